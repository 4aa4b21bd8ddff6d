// Convolutions in float16 compute in float32.
#pragma once

#include <ATen/core/stack.h>

#include "traits.h"

namespace sim {

/// Makes the tensors of a convolution in float16 float32, until `round` makes its results float16 again.
///
/// A GPU does the same: its kernels add up in float32. And where the processor has no arithmetic for float16, the CPU's
/// kernels for it take 20 to 70 times as long as those for float32. Other operations are left alone, and so are
/// convolutions of tensors of different types, which the kernel refuses.
class Widened {
 public:
  Widened(const Traits& traits, torch::jit::Stack* stack);
  void round();

 private:
  torch::jit::Stack* stack_;
  size_t begin_;  // of the arguments, and then of the results
  bool widened_ = false;
};

}  // namespace sim
