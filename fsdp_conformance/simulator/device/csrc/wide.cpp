#include "wide.h"

#include <ATen/ATen.h>

namespace sim {

Widened::Widened(const Traits& traits, torch::jit::Stack* stack)
    : stack_(stack), begin_(stack->size() - traits.arguments.size()) {
  if (!traits.adds_up_in_float32) {
    return;
  }
  bool all = true;
  for (size_t i = begin_; i < stack->size(); ++i) {
    each_tensor((*stack)[i], [&](const at::Tensor& tensor) { all &= tensor.scalar_type() == at::kHalf; });
  }
  if (!all) {
    return;
  }
  widened_ = true;
  for (size_t i = begin_; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = value.toTensor().to(at::kFloat);
    }
  }
}

void Widened::round() {
  if (!widened_) {
    return;
  }
  for (size_t i = begin_; i < stack_->size(); ++i) {
    c10::IValue& value = (*stack_)[i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = value.toTensor().to(at::kHalf);
    }
  }
}

}  // namespace sim
