// CPU kernels on pinned memory, which the checker watches while copies to or from the device are in flight.
//
// It sees torch's operations. It does not see accesses that bypass torch: numpy(), tolist(), a process group for CPU
// tensors. Those still find NaN where a copy has not arrived yet.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace sim {

/// Watch this thread's kernels on CPU tensors until no copy is in flight.
void watch_host_kernels();

/// While copies are in flight, an observer is called for the operations of all threads. That is how other threads
/// notice with their next operation, and how operations that Python dispatches are seen. The observer cannot raise: in
/// Mode::Raise the next operation that it does not handle raises instead.
void register_host_watch();
void watch_all_threads(bool on);

// Whether kernels on CPU tensors are watched at all.
void set_host_watch(bool on);
bool host_watch();

/// torch's key for modes that see every operation of a thread. Only torch's own tests use it.
constexpr auto kHostWatchKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// For its lifetime, this thread's kernels on CPU tensors are not noted. Excluding the key does not suffice as a sign
/// of that: torch excludes it as well for operations that Python dispatches, such as those of a DTensor.
class NotWatched {
 public:
  NotWatched();
  ~NotWatched();
  NotWatched(const NotWatched&) = delete;
  NotWatched& operator=(const NotWatched&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_{kHostWatchKey};
};

/// For its lifetime, this thread calls CPU kernels on behalf of the device: below autograd, and not as the host.
class OnHost {
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  NotWatched not_watched_;
};

}  // namespace sim
