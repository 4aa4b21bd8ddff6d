// Copies between the device and pinned memory that the host has not waited for yet.
//
// They are stored as bytes and addresses, not as tensors, so that nothing of torch is touched under the lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "checker.h"

namespace sim {

/// Whether there are any. If not, the host's accesses to pinned memory need no check.
bool pinned_copies_in_flight();

/// The device copies `value` (a CPU tensor) into `target`, which is pinned. The host finds NaN in it until it has
/// waited for the stream.
void copy_to_pinned(const at::Tensor& target, const at::Tensor& value, c10::Stream stream);

/// What a copy on the device reads from `source`, which is pinned: its contents with all copies into it complete.
/// Contiguous.
at::Tensor contents_of_pinned(const at::Tensor& source);

/// The device copies `contents`, read from `source`. When the host waits, it is checked whether the host has
/// overwritten the source too early.
void copy_from_pinned(const at::Tensor& source, const at::Tensor& contents, c10::Stream stream, const SitePtr& site);

/// A kernel of the host writes to these bytes. That access has been noted, so the check at the next wait leaves them
/// out.
void source_written(BlockId block, const Extent& extent);

// Called before and after every wait of the host. In Mode::Raise the first one raises if the host overwrote a source
// too early.
void before_host_wait();
void after_host_wait();

/// Accesses of the host that bypass torch (NumPy's, for example) are noticed when they happen, and noted here: before
/// the host waits, and before hazards are read.
void note_touches(bool may_raise);
/// A kernel of torch's touches the tensor, and that access has been noted.
void expose_pinned(const at::Tensor& tensor);

/// Forget the copies to and from a block that is freed.
void pinned_memory_freed(BlockId block);

// While a thread is suspended (checker.suspended()), the contents of all copies are visible. Nests.
void reveal_pinned();
void hide_pinned();

}  // namespace sim
