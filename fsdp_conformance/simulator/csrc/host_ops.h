// Kernels of the CPU on pinned memory, seen by the checker while copies from and to the device are in flight.
//
// Seen are torch's operations. Not seen is what reads or writes the memory behind torch's back: numpy(), tolist(), a
// process group for CPU tensors. It finds NaN in what a copy has not filled yet, all the same.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace sim {

/// From now on this thread's kernels on CPU tensors are looked at, until no copy is in flight.
void watch_host_kernels();

/// While copies are in flight torch's observers are called in all threads: the others find out with their next
/// operation, and what Python dispatches is seen at all. These operations are looked at by the observer, which cannot
/// raise: in Mode::Raise the next one that it does not look at does.
void register_host_watch();
void watch_all_threads(bool on);

// Whether that is done at all.
void set_host_watch(bool on);
bool host_watch();

/// torch's key for modes that see every operation of a thread. Nothing of torch uses it but its own tests.
constexpr auto kHostWatchKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// While it lives this thread's kernels on CPU tensors are nobody's accesses. That the key is excluded does not say so:
/// torch excludes it, too, in whatever Python dispatches, such as the operations of a DTensor.
class NotWatched {
 public:
  NotWatched();
  ~NotWatched();
  NotWatched(const NotWatched&) = delete;
  NotWatched& operator=(const NotWatched&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_{kHostWatchKey};
};

/// While it lives this thread calls kernels of the CPU on behalf of the device: below autograd, and not as the host.
class OnHost {
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  NotWatched not_watched_;
};

}  // namespace sim
