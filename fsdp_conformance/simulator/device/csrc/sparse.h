// Sparse tensors in coordinate format: two dense tensors, indices and values, under one name.
//
// What only puts them together or takes them apart is torch's own code, which calls operations on the two. Everything
// else runs as one operation with the CPU's kernel (fallback.h), which reads and writes the memory of the two.
#pragma once

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>

#include <string>

namespace sim {

inline bool is_sparse_coo(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kSparse;
}

/// The parts of a sparse tensor.
at::SparseTensorImpl* parts_of(const at::Tensor& tensor);

/// A sparse tensor of these parts, on their device, with the sizes of `like` and its division into dimensions.
at::Tensor sparse_like(const at::Tensor& like, const at::Tensor& indices, const at::Tensor& values);

/// Let a sparse tensor consist of these parts, and have the sizes of `like`.
void replace_parts(
    const at::Tensor& tensor, const at::Tensor& like, const at::Tensor& indices, const at::Tensor& values);

}  // namespace sim
