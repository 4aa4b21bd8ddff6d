// What collectives owe to memory on the device.
//
// A collective does not block the host that issues it: on a GPU it is put on a stream, and a program whose ranks issue
// the collectives of several groups in different orders, or talk to each other through the store in between, runs. Here
// operations run at once, in program order, so that the bytes of an output must be there when the next operation
// touches it. They are fetched then, not before: the host blocks at the first touch of an output, and where it waits
// for the stream, an event or the device itself.
//
// What remains: who touches an output waits for the peers, where on a GPU the host would go on and only the stream
// would wait. Ranks that touch the outputs of two groups in opposite orders before they issue what the other one waits
// for block each other here; on a GPU they do so as well if the touching kernels are on one stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "settle.h"
#include "transport.h"

namespace sim {

/// Where a result belongs: a CPU tensor over memory of the device. Forgotten when that memory is freed.
struct Target {
  explicit Target(at::Tensor place);

  at::Tensor place;
  const char* begin;
  const char* end;
  bool poisoned = false;  // NaN instead of the result
  std::atomic<bool> forgotten{false};
};

/// One exchange of a call, and where its results belong.
struct Part {
  std::shared_ptr<Exchange> exchange;
  std::vector<std::unique_ptr<Target>> targets;  // as many as results
  int64_t divisor = 1;                           // an average: the sum is divided where it is delivered
};

/// A collective as the program called it: one exchange, or several that it coalesced.
class CollectiveCall : public std::enable_shared_from_this<CollectiveCall> {
 public:
  /// Before `publish`.
  void add(Part part);
  /// Keep the memory of tensors on the CPU, which nobody reports as freed, as long as the call is there.
  void hold(const std::vector<at::Tensor>& tensors);
  /// From now on who touches a target fetches the results, and so does who waits on the host for operation `tick` of the
  /// lane, which is a stream of the device.
  void publish(c10::DeviceIndex device, Lane lane, uint64_t tick);

  /// Whether the peers have done their part; the results need not be in place.
  bool done();
  /// Block until the results are in place; false at the deadline. Throws why a peer or the transport failed. No GIL.
  bool finish(std::optional<Deadline> deadline);
  void abort(const std::string& reason);
  /// Why it failed; empty if it has not, as far as anybody has looked.
  std::string failure();

 private:
  friend void settle(const void* begin, size_t nbytes);
  friend void forget(const void* begin, size_t nbytes);
  void deliver(const std::vector<std::vector<at::Tensor>>& results);
  void unpublish();

  std::vector<Part> parts_;
  std::vector<c10::Storage> held_;
  std::mutex mutex_;  // delivering, forgetting and `failure_`
  bool delivered_ = false;
  std::string failure_;
};

/// Lets go of the GIL for as long as it lives, if this thread has it.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;
};

}  // namespace sim
