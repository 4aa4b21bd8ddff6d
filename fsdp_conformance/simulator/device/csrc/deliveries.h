// Results of collectives that device memory has yet to receive.
//
// A collective does not block the host that issues it. On a GPU it is put on a stream, so ranks may issue the
// collectives of several groups in different orders, or talk to each other through the store in between. Here
// operations run immediately, in program order, so the bytes of an output must be there when the next operation touches
// it. They are fetched at that moment, not before: the host blocks when an output is first touched, and when it waits
// for the stream, an event or the device.
//
// One difference remains: the host waits for the peers when it touches an output, where on a GPU only the stream would
// wait. Two ranks deadlock here if they touch the outputs of two groups in opposite orders, each before issuing what
// the other waits for. On a GPU they would also deadlock if the kernels that touch the outputs are on one stream.
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

/// The destination of a result: a CPU tensor over device memory. Forgotten when that memory is freed.
struct Target {
  explicit Target(at::Tensor place);

  at::Tensor place;
  const char* begin;
  const char* end;
  bool poisoned = false;  // NaN instead of the result
  std::atomic<bool> forgotten{false};
};

/// One exchange of a call, and the destinations of its results.
struct Part {
  std::shared_ptr<Exchange> exchange;
  std::vector<std::unique_ptr<Target>> targets;  // one for each result
  int64_t divisor = 1;                           // for an average: the sum is divided on delivery
};

/// A collective as the program called it: one exchange, or several if they were coalesced.
class CollectiveCall : public std::enable_shared_from_this<CollectiveCall> {
 public:
  /// Call it before `publish`.
  void add(Part part);
  /// Keep the memory of CPU tensors alive as long as the call: nothing reports when it is freed.
  void hold(const std::vector<at::Tensor>& tensors);
  /// From now on touching a target fetches the results, and so does a host wait for operation `tick` of the lane, a
  /// stream of the device.
  void publish(c10::DeviceIndex device, Lane lane, uint64_t tick);

  /// Whether the peers have done their part; the results need not be delivered yet.
  bool done();
  /// Block until the results are delivered; false at the deadline. Throws if a peer or the transport failed. Call it
  /// without the GIL. A failure is reported once, to a caller who needs the results.
  bool finish(std::optional<Deadline> deadline, bool needs_results = true);
  void abort(const std::string& reason);
  /// Why it failed; empty if no failure has been seen so far.
  std::string failure();
  /// Whether the failure was thrown to a caller who needs the results.
  bool has_reported_failure();

 private:
  friend void settle(const void* begin, size_t nbytes);
  friend void forget(const void* begin, size_t nbytes);
  void deliver(const std::vector<std::vector<at::Tensor>>& results);
  void unpublish();

  std::vector<Part> parts_;
  std::vector<c10::Storage> held_;
  std::mutex mutex_;  // for delivering, forgetting, and what is below
  bool delivered_ = false;
  bool reported_ = false;
  std::string failure_;
};

/// The threads of the host that wait for the peers of a collective now.
struct Waiting {
  int main = 0;  // 1 if the main thread does
  int others = 0;
  uint64_t number = 0;  // counts all waits: unchanged if no wait has begun since
};
Waiting waiting();

/// Releases the GIL for its lifetime, if this thread holds it.
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
