// Batch normalisation of half precision with statistics in float32, which CUDA accepts with weights of either type. The
// CPU wants weights and statistics of one type, so here weights in half precision become float32 for its kernel.
// FSDP's mixed precision makes such modules: it casts parameters, and leaves buffers alone. CUDA's fused kernel for the
// gradients refuses them; it computes those of all inputs but those with channels last, such as 2D ones
// (aten/src/ATen/native/cuda/Normalization.cu in torch).
#include <ATen/ATen.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "fallback.h"

namespace sim {
namespace {

using Weight = std::optional<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

bool is_half(const Weight& weight) {
  return weight && weight->defined() && at::isReducedFloatingType(weight->scalar_type());
}

bool is_mixed(const at::Tensor& input, const Weight& weight, const Weight& running_mean) {
  return at::isReducedFloatingType(input.scalar_type()) && is_half(weight) && running_mean && running_mean->defined() &&
      running_mean->scalar_type() == at::kFloat;
}

Weight exact(const Weight& weight) {
  return is_half(weight) ? weight->to(at::kFloat) : weight;
}

bool has_channels_last(const at::Tensor& input) {
  return input.is_contiguous(at::MemoryFormat::ChannelsLast) || input.is_contiguous(at::MemoryFormat::ChannelsLast3d) ||
      (input.is_contiguous() && input.stride(1) == 1);
}

Three run(const char* name, torch::jit::Stack stack) {
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

Three batch_norm(
    const at::Tensor& input, const Weight& weight, const Weight& bias, const Weight& running_mean,
    const Weight& running_var, bool training, double momentum, double eps) {
  const bool mixed = is_mixed(input, weight, running_mean);
  return run(
      "aten::native_batch_norm",
      {input, mixed ? exact(weight) : weight, mixed ? exact(bias) : bias, running_mean, running_var, training, momentum,
       eps});
}

Three batch_norm_backward(
    const at::Tensor& grad, const at::Tensor& input, const Weight& weight, const Weight& running_mean,
    const Weight& running_var, const Weight& save_mean, const Weight& save_invstd, bool train, double eps,
    std::array<bool, 3> mask) {
  const bool mixed = is_mixed(input, weight, running_mean);
  TORCH_CHECK(
      !mixed || has_channels_last(input) || !mask[0] || !(mask[1] || mask[2]), "Expected running_mean to have type ",
      input.scalar_type(), " but got ", running_mean->scalar_type());
  auto [of_input, of_weight, of_bias] =
      run("aten::native_batch_norm_backward",
          {grad, input, mixed ? exact(weight) : weight, running_mean, running_var, save_mean, save_invstd, train, eps,
           c10::List<bool>({mask[0], mask[1], mask[2]})});
  const auto as_weight = [&](const at::Tensor& found) {
    return mixed && found.defined() ? found.to(weight->scalar_type()) : found;
  };
  return {of_input, as_weight(of_weight), as_weight(of_bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("native_batch_norm", TORCH_FN(batch_norm));
  library.impl("native_batch_norm_backward", TORCH_FN(batch_norm_backward));
}

}  // namespace sim
