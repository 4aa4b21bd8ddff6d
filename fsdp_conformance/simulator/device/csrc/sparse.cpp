#include "sparse.h"

#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/resize_as_sparse_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/zero_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "fallback.h"
#include "host_ops.h"
#include "runtime.h"

namespace sim {

namespace {

using Maybe = std::optional<at::Device>;

c10::Device home_of(const Maybe& device, const at::Tensor& values = {}) {
  return values.defined() ? values.device() : c10::Device(kSim, index_of(device.value_or(c10::Device(kSim))));
}

// The dispatcher sets no device for these: a new tensor would be on the current one.

at::Tensor with_dims(
    int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef size, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, Maybe device, std::optional<bool> pin_memory) {
  const c10::DeviceGuard on(home_of(device));
  return at::native::new_with_dims_sparse(sparse_dim, dense_dim, size, dtype, layout, device, pin_memory);
}

at::Tensor with_parts(
    int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size, const at::Tensor& indices,
    const at::Tensor& values, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, Maybe device,
    std::optional<bool> pin_memory, std::optional<bool> is_coalesced) {
  const c10::DeviceGuard on(home_of(device, values));
  return at::native::new_with_dims_and_tensor_sparse_symint(
      sparse_dim, dense_dim, size, indices, values, dtype, layout, device, pin_memory, is_coalesced);
}

at::Tensor sparse_empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, Maybe device,
    std::optional<bool> pin_memory, std::optional<at::MemoryFormat> memory_format) {
  const c10::DeviceGuard on(home_of(device));
  return at::native::empty_sparse(size, dtype, layout, device, pin_memory, memory_format);
}

at::Tensor sparse_clone(const at::Tensor& self, std::optional<at::MemoryFormat> memory_format) {
  const c10::DeviceGuard on(self.device());
  return at::native::clone_sparse(self, memory_format);
}

at::Tensor& sparse_copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TORCH_CHECK(
      is_sparse_coo(self) && is_sparse_coo(source), "copy_() between dense and sparse Tensors is not implemented! ",
      "Found self type = ", self.toString(), " and src type = ", source.toString());
  return at::native::copy_sparse_(self, source, non_blocking);
}

/// Tensors in other formats.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.schema().name(),
      ": nested, quantized and compressed sparse tensors (CSR and its relatives) are not simulated. Use dense tensors, "
      "or sparse ones in coordinate format");
}

}  // namespace

at::SparseTensorImpl* parts_of(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::Tensor sparse_like(const at::Tensor& like, const at::Tensor& indices, const at::Tensor& values) {
  const bool on_host = values.is_cpu();
  const c10::DeviceGuard on(values.device());
  auto made = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(on_host ? c10::DispatchKey::SparseCPU : c10::DispatchKey::SparsePrivateUse1), values.dtype());
  replace_parts(made, like, indices, values);
  return made;
}

void replace_parts(
    const at::Tensor& tensor, const at::Tensor& like, const at::Tensor& indices, const at::Tensor& values) {
  auto* parts = parts_of(tensor);
  const auto* model = parts_of(like);
  parts->raw_resize_(model->sparse_dim(), model->dense_dim(), like.sizes());
  parts->set_indices_and_values_unsafe(indices, values);
  parts->set_coalesced(model->coalesced());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("_sparse_coo_tensor_with_dims", TORCH_FN(with_dims));
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(with_parts));
  library.impl("empty.memory_format", TORCH_FN(sparse_empty));
  library.impl("empty_like", TORCH_FN(at::native::empty_like_sparse_coo));
  library.impl("clone", TORCH_FN(sparse_clone));
  library.impl("copy_", TORCH_FN(sparse_copy_));
  library.impl("copy_sparse_to_sparse_", TORCH_FN(at::native::copy_sparse_));
  library.impl("zero_", TORCH_FN(at::native::zero_sparse_));
  library.impl("resize_as_sparse_", TORCH_FN(at::native::resize_as_sparse_));
  library.impl("sparse_resize_", TORCH_FN(at::native::sparse_resize_));
  library.impl("sparse_resize_and_clear_", TORCH_FN(at::native::sparse_resize_and_clear_));
  library.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  library.impl("_values", TORCH_FN(at::native::_values_sparse));
  library.impl("indices", TORCH_FN(at::native::indices_sparse));
  library.impl("values", TORCH_FN(at::native::values_sparse));
  library.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  library.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  library.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  library.impl("_dimI", TORCH_FN(at::native::sparse_dim_sparse));
  library.impl("_dimV", TORCH_FN(at::native::dense_dim_sparse));
  library.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  library.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

}  // namespace sim
