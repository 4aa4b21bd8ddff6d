// The arguments of collectives, with ProcessGroupNCCL's checks: in its words, plus the name of the tensor.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <vector>

namespace sim {

/// A tensor and its name in messages.
struct Argument {
  at::Tensor tensor;
  std::string name;
};

/// The tensors of a list, as name[0], name[1], ...
std::vector<Argument> named(const std::vector<at::Tensor>& tensors, const std::string& name);

/// "output tensor of shape [4, 2], strides [2, 1], Float on sim:0".
std::string describe(const Argument& argument);

/// Whether the elements fill their memory without gaps, in the order of one of torch's memory formats.
bool is_raw(const at::Tensor& tensor);

// Each of these raises if its condition does not hold.
void check_device(const Argument& argument, c10::DeviceType type);
void check_dense(const Argument& argument, c10::Device device);
/// Dense and without gaps, because collectives transfer memory as it is laid out.
void check_contiguous(const Argument& argument, c10::Device device);
void check_dtype(const Argument& argument);
void check_same_dtype(const Argument& argument, const Argument& other);
void check_same_sizes(const Argument& argument, const Argument& other);
void check_numel(const Argument& argument, int64_t numel, const std::string& whose);
void check_length(const std::vector<at::Tensor>& list, int size, const char* name, const char* collective);
void check_rank(int rank, int size, const char* what, const char* collective);

bool same_sizes(const std::vector<at::Tensor>& tensors);

/// A view of a complex tensor as pairs of real numbers, for the collectives that accept complex tensors.
at::Tensor as_real(const at::Tensor& tensor);
at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& reduce, const char* collective);

/// How a reduction is carried out.
struct Reduction {
  at::ScalarType dtype;          // bools travel as bytes
  c10d::ReduceOp::RedOpType op;  // SUM, PRODUCT, MIN or MAX
  int64_t divisor = 1;           // divides the result, for an average
  at::Tensor factor;             // multiplies the input, for PREMUL_SUM; may be undefined
  double scalar_factor = 1;      // the same, where the factor is a number
  std::string name;
};
Reduction reduction_of(const c10d::ReduceOp& reduce, const Argument& argument, int size);

}  // namespace sim
