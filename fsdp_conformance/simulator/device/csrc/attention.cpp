// Which kernel computes attention. The device has the CPU's two: the fused one, and the one made of other operations
// ("math"), whose numbers differ in the last bits.
//
// A program may allow some of CUDA's kernels by name (`torch.nn.attention.sdpa_kernel`). Any fused one is the CPU's
// here. Under CUDA's names, inputs that CUDA has no kernel for among those allowed are refused as on CUDA.
#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <torch/library.h>

#include <array>

#include "cuda_names.h"
#include "runtime.h"

namespace sim {
namespace {

// Of torch's SDPBackend, which has moved between versions.
constexpr int64_t kNone = -1;
constexpr int64_t kMath = 0;

struct Attention {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const std::optional<at::Tensor>& mask;
  double dropout;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;

  bool masked() const {
    return mask && mask->defined();
  }
};

// What CUDA's kernels accept, on a device of capability 9.0: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp in
// torch.

bool half_precision(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

bool has_elements(const Attention& call) {
  return call.query.dim() == 4 && call.query.numel() > 0 && call.key.numel() > 0;
}

bool flash_accepts(const Attention& call) {
  const int64_t width = call.query.size(-1);
  return has_elements(call) && half_precision(call.query) && !call.masked() && width <= 256 &&
      call.key.size(-1) == width && call.value.size(-1) == width &&
      !(call.is_causal && call.query.size(-2) != call.key.size(-2));
}

bool efficient_accepts(const Attention& call) {
  const bool single = call.query.scalar_type() == at::kFloat;
  const int64_t alignment = single ? 4 : 8;
  return has_elements(call) && (single || half_precision(call.query)) && call.query.size(-1) % alignment == 0 &&
      call.value.size(-1) % alignment == 0 && !call.enable_gqa;
}

bool cudnn_accepts(const Attention& call) {
  return has_elements(call) && half_precision(call.query) && call.query.size(-1) % 8 == 0 &&
      call.query.size(-1) <= 256 && call.value.size(-1) % 8 == 0 && call.value.size(-1) <= 256;
}

bool accepted_on_cuda(const Attention& call, const at::Context& allowed) {
  return allowed.userEnabledMathSDP() || (allowed.userEnabledFlashSDP() && flash_accepts(call)) ||
      (allowed.userEnabledMemEfficientSDP() && efficient_accepts(call)) ||
      (allowed.userEnabledCuDNNSDP() && cudnn_accepts(call));
}

/// Allows the CPU's fused kernel, under the name of flash attention, for its lifetime.
class WithFused {
 public:
  WithFused() : before_(at::globalContext().userEnabledFlashSDP()) {
    if (!before_) {
      at::globalContext().setSDPUseFlash(true);
    }
  }
  ~WithFused() {
    if (!before_) {
      at::globalContext().setSDPUseFlash(false);
    }
  }
  WithFused(const WithFused&) = delete;
  WithFused& operator=(const WithFused&) = delete;

 private:
  bool before_;
};

/// The CPU's choice for these tensors, if the fused kernel is allowed.
int64_t choice_on_host(const Attention& call) {
  const auto host = [](const at::Tensor& tensor) {
    at::Tensor view = host_view(tensor);
    if (tensor.requires_grad()) {
      view.set_requires_grad(true);
    }
    return view;
  };
  std::optional<at::Tensor> mask;
  if (call.masked()) {
    mask = host(*call.mask);
  }
  const WithFused allowed;
  return at::_fused_sdp_choice(
      host(call.query), host(call.key), host(call.value), mask, call.dropout, call.is_causal, call.scale,
      call.enable_gqa);
}

int64_t fused_sdp_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const Attention call{query, key, value, mask, dropout, is_causal, scale, enable_gqa};
  const at::Context& allowed = at::globalContext();
  const bool fused =
      allowed.userEnabledFlashSDP() || allowed.userEnabledMemEfficientSDP() || allowed.userEnabledCuDNNSDP();
  TORCH_CHECK(
      fused || allowed.userEnabledMathSDP(),
      "No viable backend for scaled_dot_product_attention was found. This is likely due to turning off both the math "
      "kernel and the fused kernels.");
  TORCH_CHECK(!cuda_names() || accepted_on_cuda(call, allowed), "No available kernel. Aborting execution.");
  if (!fused) {
    return kMath;
  }
  const int64_t choice = choice_on_host(call);
  return choice == kNone ? kMath : choice;
}

}  // namespace

std::array<bool, 3> attention_kernels(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    bool is_causal, bool enable_gqa) {
  const Attention call{query, key, value, mask, 0.0, is_causal, std::nullopt, enable_gqa};
  const at::Context& allowed = at::globalContext();
  return {
      allowed.userEnabledFlashSDP() && flash_accepts(call),
      allowed.userEnabledMemEfficientSDP() && efficient_accepts(call),
      allowed.userEnabledCuDNNSDP() && cudnn_accepts(call)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_fused_sdp_choice", TORCH_FN(fused_sdp_choice));
}

}  // namespace sim

namespace at::native {
// In torch's namespace, as the macro requires.
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::fused_sdp_choice)
}  // namespace at::native
