// torch.autocast("sim"): casts what torch.autocast("cpu") casts, so that results equal the CPU's under autocast too;
// or, under CUDA's names (as_cuda.py), what torch.autocast("cuda") casts.
//
// The operations are read from torch: they are those with a kernel for the autocast key of the CPU or of CUDA. The
// lists here say which of them are special; all others cast to fp32. ATen/autocast_mode.h has CUDA's categories.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "cuda_names.h"
#include "runtime.h"
#include "traits.h"

// From ATen/autocast_mode.h, which would include every operation of torch.
namespace at::autocast {
TORCH_API at::Tensor cached_cast(at::ScalarType to_type, const at::Tensor& arg, c10::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace sim {

namespace {

/// How an operation treats its arguments.
enum class Cast : uint8_t {
  None,         // as if it were called without autocast
  Lower,        // cast to the lower precision
  Float,        // cast to fp32
  Widest,       // cast to the widest type among them
  FloatResult,  // the result is fp32, by the argument `dtype`
  FloatDtype,   // the same, by the overload that has this argument
  Banned,
};

std::atomic<bool> cuda_names_on{false};

bool is_lower_on_cpu(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::_convolution",
      "aten::_native_multi_head_attention",
      "aten::addbmm",
      "aten::addmm",
      "aten::baddbmm",
      "aten::bmm",
      "aten::conv1d",
      "aten::conv2d",
      "aten::conv3d",
      "aten::conv_tbc",
      "aten::conv_transpose1d",
      "aten::conv_transpose2d",
      "aten::conv_transpose3d",
      "aten::linalg_vecdot",
      "aten::linear",
      "aten::matmul",
      "aten::mkldnn_rnn_layer",
      "aten::mm",
      "aten::prelu",
      "aten::scaled_dot_product_attention"};
  return names->count(name) > 0;
}

bool takes_widest_on_cpu(const std::string& name) {
  return name == "aten::cat" || name == "aten::stack" || name == "aten::index_copy";
}

Cast cast_on_cpu(const std::string& name) {
  return is_lower_on_cpu(name) ? Cast::Lower : takes_widest_on_cpu(name) ? Cast::Widest : Cast::Float;
}

Cast cast_on_cuda(const std::string& name) {
  static const auto* all = new std::unordered_map<std::string, Cast>{
      {"aten::_convolution", Cast::Lower},
      {"aten::_scaled_dot_product_flash_attention", Cast::Lower},
      {"aten::_thnn_fused_gru_cell", Cast::Lower},
      {"aten::_thnn_fused_lstm_cell", Cast::Lower},
      {"aten::addbmm", Cast::Lower},
      {"aten::addmm", Cast::Lower},
      {"aten::addmv", Cast::Lower},
      {"aten::addr", Cast::Lower},
      {"aten::baddbmm", Cast::Lower},
      {"aten::bmm", Cast::Lower},
      {"aten::chain_matmul", Cast::Lower},
      {"aten::conv1d", Cast::Lower},
      {"aten::conv2d", Cast::Lower},
      {"aten::conv3d", Cast::Lower},
      {"aten::conv_tbc", Cast::Lower},
      {"aten::conv_transpose1d", Cast::Lower},
      {"aten::conv_transpose2d", Cast::Lower},
      {"aten::conv_transpose3d", Cast::Lower},
      {"aten::convolution", Cast::Lower},
      {"aten::cudnn_convolution", Cast::Lower},
      {"aten::cudnn_convolution_transpose", Cast::Lower},
      {"aten::einsum", Cast::Lower},
      {"aten::gru_cell", Cast::Lower},
      {"aten::linalg_multi_dot", Cast::Lower},
      {"aten::linalg_vecdot", Cast::Lower},
      {"aten::linear", Cast::Lower},
      {"aten::lstm_cell", Cast::Lower},
      {"aten::matmul", Cast::Lower},
      {"aten::mm", Cast::Lower},
      {"aten::mv", Cast::Lower},
      {"aten::prelu", Cast::Lower},
      {"aten::rnn_relu_cell", Cast::Lower},
      {"aten::rnn_tanh_cell", Cast::Lower},
      {"aten::scaled_dot_product_attention", Cast::Lower},

      {"aten::cumprod", Cast::FloatResult},
      {"aten::cumsum", Cast::FloatResult},
      {"aten::linalg_matrix_norm", Cast::FloatResult},
      {"aten::linalg_vector_norm", Cast::FloatResult},
      {"aten::log_softmax", Cast::FloatResult},
      {"aten::prod", Cast::FloatResult},
      {"aten::softmax", Cast::FloatResult},
      {"aten::sum", Cast::FloatResult},

      {"aten::norm", Cast::FloatDtype},

      {"aten::addcdiv", Cast::Widest},
      {"aten::addcmul", Cast::Widest},
      {"aten::atan2", Cast::Widest},
      {"aten::bilinear", Cast::Widest},
      {"aten::cat", Cast::Widest},
      {"aten::cross", Cast::Widest},
      {"aten::dot", Cast::Widest},
      {"aten::grid_sampler", Cast::Widest},
      {"aten::index_copy", Cast::Widest},
      {"aten::index_put", Cast::Widest},
      {"aten::scatter_add", Cast::Widest},
      {"aten::stack", Cast::Widest},
      {"aten::tensordot", Cast::Widest},
      {"aten::vdot", Cast::Widest},

      {"aten::binary_cross_entropy", Cast::Banned}};
  const auto found = all->find(name);
  return found == all->end() ? Cast::Float : found->second;
}

bool eligible(const at::Tensor& tensor) {
  return tensor.device().type() == kSim && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
}

at::ScalarType widest_of(c10::ArrayRef<c10::IValue> values) {
  auto widest = at::autocast::get_autocast_dtype(kSim);
  for (const auto& value : values) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (eligible(tensor) && tensor.scalar_type() == at::kFloat) {
        widest = at::kFloat;
      }
    });
  }
  return widest;
}

c10::IValue cast(const c10::IValue& value, at::ScalarType type) {
  const auto one = [&](const at::Tensor& tensor) {
    return tensor.defined() ? at::autocast::cached_cast(type, tensor, kSim) : tensor;
  };
  if (value.isTensor()) {
    return one(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const c10::IValue& item : value.toListRef()) {
      list.push_back(one(item.toTensor()));
    }
    return list;
  }
  return value;
}

/// The keys below autocast's: operations inside this one are cast all the same.
constexpr auto kBelowAutocast =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::AutocastPrivateUse1);

bool first_is_eligible(const torch::jit::Stack& stack, size_t first) {
  return stack[first].isTensor() && stack[first].toTensor().defined() && eligible(stack[first].toTensor());
}

/// The result in fp32, unless the caller says which type it wants.
void with_float_result(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t first) {
  const auto& arguments = op.schema().arguments();
  if (first_is_eligible(*stack, first)) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "dtype" && (*stack)[first + i].isNone()) {
        (*stack)[first + i] = at::kFloat;
      }
    }
  }
  op.callBoxed(stack);
}

/// The overloads of `norm` without the argument `dtype`: those with it have the same arguments before it.
void with_float_dtype(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t first) {
  const std::string overload = op.operator_name().overload_name == "Scalar" ? "ScalarOpt_dtype" : "ScalarOpt_dim_dtype";
  const auto type = first_is_eligible(*stack, first) ? at::kFloat : (*stack)[first].toTensor().scalar_type();
  stack->emplace_back(type);
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::norm", overload.c_str()).callBoxed(stack);
}

/// The kernel of one operation.
class WithCast : public c10::OperatorKernel {
 public:
  WithCast(Cast on_cpu, Cast on_cuda) : on_cpu_(on_cpu), on_cuda_(on_cuda) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const Cast policy = cuda_names() ? on_cuda_ : on_cpu_;
    if (policy == Cast::None) {
      op.redispatchBoxed(keys & kBelowAutocast, stack);
      return;
    }
    TORCH_CHECK(
        policy != Cast::Banned,
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast, because fp16 cannot "
        "hold "
        "their gradients. Use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, without the sigmoid "
        "before it.");
    const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
    const size_t first = stack->size() - op.schema().arguments().size();
    if (policy == Cast::FloatResult) {
      with_float_result(op, stack, first);
    } else if (policy == Cast::FloatDtype) {
      with_float_dtype(op, stack, first);
    } else {
      const c10::ArrayRef<c10::IValue> arguments(stack->data() + first, stack->size() - first);
      const auto type = policy == Cast::Float ? at::kFloat
          : policy == Cast::Lower             ? at::autocast::get_autocast_dtype(kSim)
                                              : widest_of(arguments);
      for (size_t i = first; i < stack->size(); ++i) {
        (*stack)[i] = cast((*stack)[i], type);
      }
      op.callBoxed(stack);
    }
  }

 private:
  Cast on_cpu_;
  Cast on_cuda_;
};

}  // namespace

bool cuda_names() {
  return cuda_names_on.load(std::memory_order_relaxed);
}

void set_cuda_names(bool on) {
  cuda_names_on.store(on, std::memory_order_relaxed);
}

void register_autocast() {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!starts_with(name.name, "aten::") || !op || !op->hasSchema()) {
      continue;
    }
    const Cast on_cpu =
        op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU) ? cast_on_cpu(name.name) : Cast::None;
    const Cast on_cuda =
        op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA) ? cast_on_cuda(name.name) : Cast::None;
    if (on_cpu == Cast::None && on_cuda == Cast::None) {
      continue;
    }
    std::string text = name.name.substr(6);
    if (!name.overload_name.empty()) {
      text += "." + name.overload_name;
    }
    library->impl(text.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WithCast>(on_cpu, on_cuda)));
  }
  if (!dispatcher.hasBackendFallbackForDispatchKey(c10::DispatchKey::AutocastPrivateUse1)) {
    auto* all =
        new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFallthrough());
  }
}

}  // namespace sim
