// torch's tracing hooks (torch.cuda._gpu_trace): once a program has activated them, the device calls them where CUDA
// does.
//
// They run Python, so call these without a lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/GPUTrace.h>

#include "runtime.h"

namespace sim {

/// `stream.cuda_stream`, as in stream_handles.py: 0 for the default stream.
inline uintptr_t handle_of(c10::Stream stream) {
  constexpr uintptr_t kFirstHandle = 1 << 12;
  return stream.id() == 0 ? 0 : kFirstHandle + static_cast<uintptr_t>(stream.id()) - 1;
}

/// Call `hook` with the hooks if they are active, with the stream's device current, as in CUDA.
template <typename Hook>
void traced(c10::Stream stream, Hook hook) {
  if (const auto* interpreter = c10::impl::GPUTrace::get_trace()) {
    const auto before = current_device();
    set_current_device(stream.device_index());
    hook(**interpreter);
    set_current_device(before);
  }
}

inline void trace_record(const void* event, c10::Stream stream) {
  traced(stream, [&](const auto& hooks) {
    hooks.trace_gpu_event_record(c10::kCUDA, reinterpret_cast<uintptr_t>(event), handle_of(stream));
  });
}

inline void trace_wait(const void* event, c10::Stream stream) {
  traced(stream, [&](const auto& hooks) {
    hooks.trace_gpu_event_wait(c10::kCUDA, reinterpret_cast<uintptr_t>(event), handle_of(stream));
  });
}

inline void trace_host_wait(c10::Stream stream) {
  traced(stream, [&](const auto& hooks) { hooks.trace_gpu_stream_synchronization(c10::kCUDA, handle_of(stream)); });
}

}  // namespace sim
