// `torch.cuda.set_sync_debug_mode`: a warning or an error where the host waits for a stream.
#pragma once

namespace sim {

/// 0: neither, 1: warn, 2: raise an error.
void set_sync_debug_mode(int mode);
int sync_debug_mode();

/// Called before the host waits for a stream, because of an operation or `Stream.synchronize`. As on CUDA, waits for
/// events and for a whole device do not count.
void warn_or_fail_on_sync();

}  // namespace sim
