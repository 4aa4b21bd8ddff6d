// Ordering only: which kernels are left out, because nothing but numbers depends on them.
//
// Races depend on which bytes an operation touches, in what order. So an operation that computes floating-point numbers
// from others has to run just once for each kind of arguments; after that it is known what its results look like, and
// they are zeros. What decides what a program does next is computed: integers, booleans, and whatever the host waits
// for.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "traits.h"

namespace sim {

void set_ordering_only(bool on);
bool ordering_only();

struct Result;

/// What one kind of call leaves behind. Made before the kernel would run, with the arguments on the stack as tensors of
/// the CPU.
class Outcome {
 public:
  Outcome(const Traits& traits, torch::jit::Stack* stack);

  /// Put the results on the stack in place of the arguments, if they are known. False if the kernel has to run.
  bool replace_kernel();
  /// The kernel has run: learn what its results look like.
  void learn();

 private:
  bool may_be_left_out() const;
  void describe_arguments();
  at::Tensor tensor_of(const Result& result) const;

  const Traits& traits_;
  torch::jit::Stack* stack_;
  size_t begin_;
  std::string key_;                    // empty if the kernel has to run
  std::vector<at::Tensor> arguments_;  // all tensors, in order
  std::vector<std::string> shapes_;    // of `arguments_`, before the kernel
};

}  // namespace sim
