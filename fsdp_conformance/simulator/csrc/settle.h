// What collectives owe to memory of the device (deliveries.h), for those who touch that memory, free it, or let the host
// wait for what is done to it.
#pragma once

#include <ATen/core/Tensor.h>

#include "checker.h"

namespace sim {

/// Whether anything is owed. While nothing is, the functions below cost one load.
bool deliveries_pending();

/// Put in place what is owed to these bytes. To be called before anything reads or writes memory of the device; blocks
/// until the peers have come. The caller holds no lock; the GIL is let go of meanwhile.
void settle(const void* begin, size_t nbytes);
/// The bytes that a tensor spans.
void settle(const at::Tensor& tensor);

/// The bytes are freed: what is owed to them is dropped. Waits for no peer.
void forget(const void* begin, size_t nbytes);

/// The host waits for what the clock knows: so it waits for the peers in every collective in there, as it does on an
/// accelerator, whose collectives end together on all ranks.
void settle_until(const Clock& clock);
/// The same for everything on a device.
void settle_device(c10::DeviceIndex device);
/// Whether the peers have come to all of these collectives, so that the answer to a query can be "yes".
bool settled_until(const Clock& clock);

}  // namespace sim
