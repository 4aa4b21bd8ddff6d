// What the device offers the rest of the extension: streams, waits, and accesses to tensors.
//
// Locking: no function here holds a lock while it calls torch, Python or a kernel. Copying or destroying a tensor
// handle can take the interpreter's lock, and its holder may be waiting for ours.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checker.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 127;  // c10::DeviceIndex goes from -128 to 127

// Devices.
c10::DeviceIndex num_devices();
void set_num_devices(int count);
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
/// The device's index, or that of the current device if it has none. Raises if there is no such device.
c10::DeviceIndex index_of(c10::Device device);

// Streams. Ids are small integers; 0 is a device's default stream.
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream set_current_stream(c10::Stream stream);  // returns the stream that was current
/// From a pool of 32 per priority (below 0: high), as on CUDA: the 33rd is the first again.
c10::Stream new_stream(c10::DeviceIndex device, int priority);
/// The same for a stream that the program asks for: hazards name it after the line that did.
c10::Stream new_stream_of_program(c10::DeviceIndex device, int priority);
int priority_of(c10::Stream stream);
Lane lane_of(c10::Stream stream);

/// Everything that orders one lane after another, by what the program called. Filters can drop single ones.
enum class Wait : uint8_t {
  StreamWaitsEvent,
  HostWaitsEvent,
  HostWaitsStream,
  HostWaitsDevice,
  WorkWait,
  RecordStream,
  EventRecord,      // not a wait: whether an event records what its stream was given
  CollectiveIssue,  // a group's stream waits for the current stream before a collective
};
const char* name_of(Wait wait);

/// Asked before each wait, outside all locks; false drops the wait. If empty, no wait is dropped.
using WaitFilter = std::function<bool(Wait, c10::Stream)>;
void set_wait_filter(WaitFilter filter);
/// The filter's answer for a wait.
bool keeps(Wait wait, c10::Stream stream);

// Each of these asks the filter first. `mark`: the event or the collective that the wait is for, if the program knows
// it.
void stream_waits(c10::Stream stream, const Clock& clock, Wait why, const Mark& mark = {});
void host_waits(const Clock& clock, c10::Stream recorded_on, const Mark& mark = {});
/// `implicit`: the operation that waits, if the program did not ask for the wait.
void host_waits_stream(c10::Stream stream, const SitePtr& implicit = nullptr);
void host_waits_device(c10::DeviceIndex device);
void record_stream(const c10::DataPtr& data, c10::Stream stream);

/// Milliseconds between the recording of two of torch's events, given by address.
double elapsed_time(void* first, void* second);

/// Whether this thread's operations are checked now.
inline bool checking() {
  return Checker::get().mode() != Mode::Off && !Checker::suspended();
}

/// The site of the running operation: its name, this thread's label, and the Python stack if tracing is on.
SitePtr here(const std::string& op);
/// Like `here`, for callers that may hold other locks; above all for frees, which happen wherever the last reference is
/// dropped. If the stack cannot be captured without waiting (in autograd's threads, and in Python 3.13 and newer), the
/// site gets the stack of this thread's next operation, and "free" becomes "free, before".
SitePtr here_without_waiting(const std::string& op);
/// This thread calls a backward pass: what other threads do for it gets this thread's stack below their own.
void begin_backward();
void end_backward();
void set_tracing(bool on);
bool tracing();
/// Set this thread's label; returns the previous one.
std::string set_label(std::string label);
std::string label();

/// The operation that this thread is running: the site of memory that is allocated during it.
class Operation {
 public:
  explicit Operation(const SitePtr* site);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  /// Null if there is none.
  static const SitePtr* current();

 private:
  const SitePtr* outer_;
};

inline bool on_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

/// Note that the operation `site` on `stream` reads or writes a tensor on the device (or a pinned one). If that is a
/// hazard, raises c10::Error in Mode::Raise and returns true in Mode::Poison.
/// `finished`: the host waits for the operation before the program goes on.
bool note_access(const at::Tensor& tensor, Kind kind, c10::Stream stream, const SitePtr& site, bool finished = false);
bool note_access(const at::Tensor& tensor, Kind kind, Lane lane, const SitePtr& site, bool finished = false);
/// The memory of a tensor and its bytes within that; nothing for a tensor without memory, or with memory from
/// elsewhere.
struct Bytes {
  BlockId block;
  Extent extent;
};
std::optional<Bytes> bytes_of(const at::Tensor& tensor);
/// The bytes of a tensor within its storage.
Extent extent_of(const at::Tensor& tensor);
/// Raise for the hazard, or return whether to poison, depending on the mode.
bool act_on(const Hazard& hazard);
/// Both accesses, in one line.
std::string text_of(const Hazard& hazard);

/// The site with the name of the memory that it touches, if the memory has one.
SitePtr with_name(const SitePtr& site, BlockId block);
/// Name the memory of a tensor: every site that touches it carries the name, until the memory is freed.
void name_tensor(const at::Tensor& tensor, std::string name);

/// A CPU tensor over the memory of a device tensor; no access is noted.
at::Tensor host_view(const at::Tensor& tensor);
/// Fill a tensor's bytes with NaN, without noting an access.
void poison(const at::Tensor& tensor);

/// Hold storages, not tensors, beyond the end of an operation: `.data = x` swaps the storage under a tensor.
void keep_until_host_knows(Clock clock, std::vector<c10::Storage> storages);

}  // namespace sim
