// Values that nothing has written: how operations hand them on, and where using them is a hazard.
//
// As with other tools for uninitialized memory, copying it and computing with it is allowed: the copy, or the result,
// counts as unwritten in turn, byte by byte where the bytes correspond. A hazard is its use: by the host (`item`, a
// copy of a tensor of which nothing is written), in a branch (an operation whose result's size, or whose answer to the
// host, depends on it), and in a collective that reduces or sends a tensor of which nothing is written. A tensor that
// is written in part, such as a flat buffer with padding, may be communicated: gathered or reduced padding that no
// operation uses is legal.
//
// In doubt a byte counts as written: indexed writes write all of their target, `where` and masks choose what is
// written, and what arrives from other ranks is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "flow.h"
#include "runtime.h"

namespace sim {

/// What a tensor has that nothing has written, taken before an operation that may overwrite it.
struct Unset {
  std::vector<Unwritten> bytes;  // from the tensor's first byte on
  bool all = false;              // no byte of the tensor is written
  bool contiguous = false;
  int64_t numel = 0;
  int64_t itemsize = 1;
};

/// Nothing if the tensor is written, has no memory on the device, or if unwritten memory is not tracked.
std::optional<Unset> unset_of(const at::Tensor& tensor);

/// The same for `numel` elements of a contiguous tensor from the element `first` on.
std::optional<Unset> part_of(const Unset& unset, int64_t first, int64_t numel);

/// The tensor was computed from values that were not written. `shift`: where in it those of the input begin, in bytes.
void spread(const Unset& from, const at::Tensor& to, Flow flow, int64_t shift = 0);

/// The same for a product, of which the operand is unwritten in part. `kept`: see Traits. In the slices of the result
/// that depend on unwritten values, those elements are unwritten that are NaN, as memory is that nothing has written.
void spread_product(const at::Tensor& operand, const std::vector<int64_t>& kept, const at::Tensor& result);

/// The operation uses the tensor's value. If it is unwritten that is a hazard: raises, or returns true to poison.
bool note_use(const at::Tensor& tensor, const Unset& unset, Lane lane, const SitePtr& site);

/// A tensor was written without an access that was noted.
void mark_written(const at::Tensor& tensor);

}  // namespace sim
