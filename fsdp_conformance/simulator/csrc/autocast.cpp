// torch.autocast("sim"): casts what torch.autocast("cpu") casts, so that results equal the CPU's under autocast too.
//
// The operations are read from torch: they are those with a kernel for the CPU's autocast key. The two lists here say
// which of them cast to the lower precision and which to the widest; all others cast to fp32.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

#include "runtime.h"
#include "traits.h"

// From ATen/autocast_mode.h, which would include every operation of torch.
namespace at::autocast {
TORCH_API at::Tensor cached_cast(at::ScalarType to_type, const at::Tensor& arg, c10::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace sim {

namespace {

enum class Cast : uint8_t { Lower, Float, Widest };

bool is_lower(const std::string& name) {
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

bool takes_widest(const std::string& name) {
  return name == "aten::cat" || name == "aten::stack" || name == "aten::index_copy";
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

template <Cast policy>
void with_cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const size_t count = op.schema().arguments().size();
  const size_t first = stack->size() - count;
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + first, count);
  const auto type = policy == Cast::Float ? at::kFloat
      : policy == Cast::Lower             ? at::autocast::get_autocast_dtype(kSim)
                                          : widest_of(arguments);
  for (size_t i = first; i < stack->size(); ++i) {
    (*stack)[i] = cast((*stack)[i], type);
  }
  op.callBoxed(stack);
}

}  // namespace

void register_autocast() {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!starts_with(name.name, "aten::") || !op || !op->hasSchema()) {
      continue;
    }
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) {
      continue;
    }
    std::string text = name.name.substr(6);
    if (!name.overload_name.empty()) {
      text += "." + name.overload_name;
    }
    if (is_lower(name.name)) {
      library->impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&with_cast<Cast::Lower>>());
    } else if (takes_widest(name.name)) {
      library->impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&with_cast<Cast::Widest>>());
    } else {
      library->impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&with_cast<Cast::Float>>());
    }
  }
  if (!dispatcher.hasBackendFallbackForDispatchKey(c10::DispatchKey::AutocastPrivateUse1)) {
    auto* all =
        new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFallthrough());
  }
}

}  // namespace sim
