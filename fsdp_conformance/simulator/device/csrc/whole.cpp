// Recurrent networks, which torch composes of other operations, and differently for accelerators than for the CPU.
//
// To get the CPU's numbers, the CPU's code runs them as a whole, forward and backward. The backward pass recomputes the
// forward pass, because autograd on the CPU needs its intermediate results. Only the arguments are saved, so their
// memory may be freed and gathered again in between, as sharding does with parameters.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>

#include "fallback.h"
#include "host_ops.h"
#include "runtime.h"
#include "traits.h"

namespace sim {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOperations[] = {"lstm.input",     "lstm.data",     "gru.input",      "gru.data",
                                       "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data",
                                       "lstm_cell",      "gru_cell",      "rnn_tanh_cell",  "rnn_relu_cell"};

/// The tensors among the arguments, in order.
variable_list tensors_in(c10::ArrayRef<c10::IValue> arguments) {
  variable_list tensors;
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

/// The arguments, with their tensors replaced in order.
torch::jit::Stack with_tensors(c10::ArrayRef<c10::IValue> arguments, const variable_list& tensors) {
  torch::jit::Stack stack;
  auto next = tensors.begin();
  for (const auto& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      stack.emplace_back(*next++);
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const c10::IValue& item : argument.toListRef()) {
        list.push_back(item.toTensor().defined() ? *next++ : item.toTensor());
      }
      stack.emplace_back(std::move(list));
    } else {
      stack.push_back(argument);
    }
  }
  return stack;
}

/// Restores an earlier state of the CPU's default generator for its lifetime.
class GeneratorState {
 public:
  explicit GeneratorState(const at::Tensor& state) : after_(get()) {
    set(state);
  }
  ~GeneratorState() {
    set(after_);
  }
  GeneratorState(const GeneratorState&) = delete;
  GeneratorState& operator=(const GeneratorState&) = delete;

  static at::Tensor get() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
  }

 private:
  static void set(const at::Tensor& state) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
  at::Tensor after_;
};

/// What the backward pass needs to repeat a call, besides its tensors.
struct Made : torch::CustomClassHolder {
  Made(c10::OperatorHandle op, torch::jit::Stack arguments)
      : op(std::move(op)), arguments(std::move(arguments)), generator(GeneratorState::get()) {}
  c10::OperatorHandle op;
  torch::jit::Stack arguments;  // with a placeholder for each tensor
  at::Tensor generator;         // its state, for dropout
};

struct Whole : torch::autograd::Function<Whole> {
  static variable_list forward(
      AutogradContext* context, at::TensorList tensors, const c10::OperatorHandle& op,
      const torch::jit::Stack& arguments) {
    const at::Tensor placeholder = at::detail::empty_cpu({0}, at::kFloat);
    context->saved_data["call"] = c10::IValue::make_capsule(
        c10::make_intrusive<Made>(op, with_tensors(arguments, variable_list(tensors.size(), placeholder))));
    context->save_for_backward(tensors.vec());
    // With gradients enabled, as on the CPU, which chooses other kernels without them.
    return on_host(op.schema().name(), tensors.vec(), [&] {
      const NotWatched not_watched;
      const at::AutoGradMode with_graph(true);
      variable_list hosts;
      for (const auto& tensor : tensors) {
        hosts.push_back(host_view(tensor).set_requires_grad(tensor.requires_grad()));
      }
      torch::jit::Stack stack = with_tensors(arguments, hosts);
      op.callBoxed(&stack);
      variable_list results;
      for (const auto& result : tensors_in(stack)) {
        results.push_back(result.detach());
      }
      return results;
    });
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        "create_graph must be False: the simulated accelerator has no second derivative of recurrent networks");
    const auto capsule = context->saved_data.at("call").toCapsule();
    const auto& made = static_cast<const Made&>(*capsule);
    const variable_list tensors = context->get_saved_variables();
    const std::string name = made.op.schema().name() + " backward";
    variable_list read = tensors;
    for (const auto& grad : grads) {
      if (grad.defined()) {
        read.push_back(grad);
      }
    }
    variable_list needed = tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!context->needs_input_grad(i)) {
        needed[i] = at::Tensor();
      }
    }
    variable_list result = on_host(name, read, [&] { return grads_on_host(made, tensors, needed, grads); });
    result.resize(result.size() + 2);  // for the operation and its arguments
    return result;
  }

 private:
  static variable_list grads_on_host(
      const Made& made, const variable_list& tensors, const variable_list& needed, const variable_list& grads) {
    // A separate autograd graph on the CPU, inside this backward pass.
    const NotWatched not_watched;
    const at::AutoGradMode with_graph(true);
    const GeneratorState as_then(made.generator);
    variable_list hosts;
    variable_list leaves;
    for (size_t i = 0; i < tensors.size(); ++i) {
      at::Tensor host = host_view(tensors[i]);
      if (needed[i].defined()) {
        leaves.push_back(host.requires_grad_());
      }
      hosts.push_back(std::move(host));
    }
    torch::jit::Stack stack = with_tensors(made.arguments, hosts);
    made.op.callBoxed(&stack);
    const variable_list all = tensors_in(stack);
    variable_list outputs;
    variable_list weights;
    for (size_t i = 0; i < all.size(); ++i) {
      if (!grads.at(i).defined()) {
        continue;
      }
      outputs.push_back(all[i]);
      weights.push_back(host_view(grads[i]));
    }
    const variable_list found = torch::autograd::grad(
        outputs, leaves, weights, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
    variable_list result(tensors.size());
    auto next = found.begin();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (needed[i].defined()) {
        result[i] = *next++;
      }
    }
    return result;
  }
};

void autograd_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  torch::jit::Stack arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  const variable_list tensors = tensors_in(arguments);
  const bool needs_grad = at::GradMode::is_enabled() &&
      std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor.requires_grad(); });
  if (!needs_grad) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.callBoxed(stack);
  }
  variable_list results = Whole::apply(at::TensorList(tensors), op, arguments);
  torch::jit::drop(*stack, count);
  for (auto& result : results) {
    stack->emplace_back(std::move(result));
  }
}

}  // namespace

void register_whole() {
  auto* below = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto* autograd =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  for (const char* name : kOperations) {
    below->impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
    autograd->impl(name, torch::CppFunction::makeFromBoxedFunction<&autograd_kernel>());
  }
}

}  // namespace sim
