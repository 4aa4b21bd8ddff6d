// Memory for values that are on their way between ranks.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

/// A CPU tensor of one dimension, uninitialized. Large ones get the memory of an earlier one: new memory costs as much
/// as a copy, because the system clears its pages.
at::Tensor staging(int64_t numel, at::ScalarType dtype);

/// Free the memory that is kept for later calls, before the memory of the process is measured. Returns its bytes.
int64_t free_staging();

/// Copy elements between two places in host memory that have the same sizes and dtype.
void copy_bytes(const at::Tensor& to, const at::Tensor& from);

}  // namespace sim
