// What a program gives to a collective: the checks that ProcessGroupNCCL makes, in its words, with the tensor named.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <vector>

namespace sim {

/// A tensor, and what it is called in messages.
struct Argument {
  at::Tensor tensor;
  std::string name;
};

/// The tensors of a list, as name[0], name[1], ...
std::vector<Argument> named(const std::vector<at::Tensor>& tensors, const std::string& name);

/// "output tensor of shape [4, 2], strides [2, 1], Float on sim:0".
std::string describe(const Argument& argument);

/// Whether the elements fill a piece of memory without gaps, in the order of one of torch's memory formats.
bool is_raw(const at::Tensor& tensor);

// Each raises unless it is so.
void check_device(const Argument& argument, c10::DeviceType type);
void check_dense(const Argument& argument, c10::Device device);
/// Dense and without gaps: collectives transfer memory as it lies.
void check_contiguous(const Argument& argument, c10::Device device);
void check_dtype(const Argument& argument);
void check_same_dtype(const Argument& argument, const Argument& other);
void check_same_sizes(const Argument& argument, const Argument& other);
void check_numel(const Argument& argument, int64_t numel, const std::string& whose);
void check_length(const std::vector<at::Tensor>& list, int size, const char* name, const char* collective);
void check_rank(int rank, int size, const char* what, const char* collective);

bool same_sizes(const std::vector<at::Tensor>& tensors);

/// A complex tensor as pairs of real numbers, for the collectives that take it so.
at::Tensor as_real(const at::Tensor& tensor);
at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& reduce, const char* collective);

/// How a reduction is carried out.
struct Reduction {
  at::ScalarType dtype;          // bool goes as bytes
  c10d::ReduceOp::RedOpType op;  // SUM, PRODUCT, MIN or MAX
  int64_t divisor = 1;           // of the result, for an average
  at::Tensor factor;             // of what is given, for PREMUL_SUM; undefined: none
  double scalar_factor = 1;      // the same, where it is no tensor
  std::string name;
};
Reduction reduction_of(const c10d::ReduceOp& reduce, const Argument& argument, int size);

}  // namespace sim
