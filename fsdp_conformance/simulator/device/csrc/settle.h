// Pending results of collectives (deliveries.h), for code that touches device memory, frees it, or makes the host wait.
#pragma once

#include <ATen/core/Tensor.h>

#include "checker.h"

namespace sim {

/// Whether any results are pending. If not, the functions below cost one load.
bool deliveries_pending();

/// Deliver pending results to these bytes. Call it before reading or writing device memory, without holding a lock. It
/// blocks until the peers have come, and releases the GIL meanwhile.
void settle(const void* begin, size_t nbytes);
/// The bytes that a tensor spans.
void settle(const at::Tensor& tensor);

/// The bytes are freed: drop results that are pending for them, without waiting for peers.
void forget(const void* begin, size_t nbytes);

/// The host waits for everything in the clock. That includes the peers of every collective in it: as on an accelerator,
/// a collective ends together on all ranks.
void settle_until(const Clock& clock);
/// The same, for everything on a device.
void settle_device(c10::DeviceIndex device);
/// Whether the peers have come to all of these collectives, so that a query can return true.
bool settled_until(const Clock& clock);

}  // namespace sim
