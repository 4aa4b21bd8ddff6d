// Copies between the device and pinned memory that the host has not waited for.
//
// They are kept as bytes and addresses, not as tensors: nothing of torch is touched under the lock in here.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "checker.h"

namespace sim {

/// Whether there are any. While there are none, what the host does with pinned memory needs no look.
bool pinned_copies_in_flight();

/// The device has been told to copy `value` (a CPU tensor) into `target`, which is pinned. The host finds NaN in there
/// until it has waited for the stream.
void copy_to_pinned(const at::Tensor& target, const at::Tensor& value, c10::Stream stream);

/// What a copy on the device reads in `source`, which is pinned: with everything that is on its way into it. Contiguous.
at::Tensor contents_of_pinned(const at::Tensor& source);

/// The device has been told to copy `contents`, which it found in `source`. Whether the host writes into the source
/// before it has waited for the stream is looked up when it waits.
void copy_from_pinned(const at::Tensor& source, const at::Tensor& contents, c10::Stream stream, const SitePtr& site);

/// A kernel of the host writes into the bytes: that has been looked at, and is not looked up again.
void source_written(BlockId block, const Extent& extent);

// Around every wait of the host. The first raises in Mode::Raise for a source that the host wrote into too early.
void before_host_wait();
void after_host_wait();

/// Forget the copies into and out of a block that is freed.
void pinned_memory_freed(BlockId block);

// While a thread looks on without taking part (checker.suspended()), the contents of all copies are there. Nests.
void reveal_pinned();
void hide_pinned();

}  // namespace sim
