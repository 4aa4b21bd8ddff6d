// What the device offers to the rest of the extension: streams, waits, and accesses of tensors.
//
// Locks. Nothing in here holds a lock of its own while it calls torch, Python or a kernel: copying or destroying a
// tensor's handle can take the interpreter's lock, whose holder may be waiting for ours.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
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
/// The device's own index, or the current one's for a device without index. Raises for one that there is not.
c10::DeviceIndex index_of(c10::Device device);

// Streams. Ids are small integers; 0 is a device's default stream.
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream set_current_stream(c10::Stream stream);  // returns the stream that was current
/// From a pool of 32 per priority (below 0: high), as on CUDA: the 33rd is the first again.
c10::Stream new_stream(c10::DeviceIndex device, int priority);
int priority_of(c10::Stream stream);
Lane lane_of(c10::Stream stream);

/// Everything that orders one lane after another, by what the program called. A study can drop single ones.
enum class Wait : uint8_t {
  StreamWaitsEvent,
  HostWaitsEvent,
  HostWaitsStream,
  HostWaitsDevice,
  WorkWait,
  RecordStream,
  EventRecord,  // no wait: whether an event takes up what its stream has been given
  CollectiveIssue,  // a group's stream waits for the current one before a collective
};
const char* name_of(Wait wait);

/// Asked before each wait, outside every lock; false drops it. Empty: none is dropped.
using WaitFilter = std::function<bool(Wait, c10::Stream)>;
void set_wait_filter(WaitFilter filter);
/// What the filter says.
bool keeps(Wait wait, c10::Stream stream);

// Each of these asks the filter first.
void stream_waits(c10::Stream stream, const Clock& clock, Wait why);
void host_waits(const Clock& clock, c10::Stream recorded_on);
void host_waits_stream(c10::Stream stream);
void host_waits_device(c10::DeviceIndex device);
void record_stream(const c10::DataPtr& data, c10::Stream stream);

/// Milliseconds between the records of two events of torch, by their address.
double elapsed_time(void* first, void* second);

/// Whether this thread's operations are checked now.
inline bool checking() {
  return Checker::get().mode() != Mode::Off && !Checker::suspended();
}

/// The site of the running operation: its op, the label of this thread, and the Python stack where tracing is on.
SitePtr here(const std::string& op);
/// As `here`, for whoever may hold locks of others, above all for memory that is freed by whoever holds it last: where the
/// stack cannot be had without waiting, it is that of this thread's next operation, and the op is "free, before".
SitePtr here_without_waiting(const std::string& op);
/// What this thread calls now is a backward pass: what other threads do for it has this thread's stack below their own.
void begin_backward();
void end_backward();
void set_tracing(bool on);
bool tracing();
/// The label of what this thread does from now on; the one before is returned.
std::string set_label(std::string label);
std::string label();

/// The operation that this thread carries out: memory that is allocated within it says so.
class Operation {
 public:
  explicit Operation(const SitePtr* site);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  /// Null: none.
  static const SitePtr* current();

 private:
  const SitePtr* outer_;
};

inline bool on_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

/// Note that the operation `site` on `stream` reads or writes a tensor on the device (or a pinned one). Raises
/// c10::Error in Mode::Raise if that is a hazard. Returns true if it is one and the mode asks for poison.
bool note_access(const at::Tensor& tensor, Kind kind, c10::Stream stream, const SitePtr& site);
bool note_access(const at::Tensor& tensor, Kind kind, Lane lane, const SitePtr& site);
/// The bytes of a tensor within its storage.
Extent extent_of(const at::Tensor& tensor);
/// Raises for the hazard or says whether to poison, by the mode.
bool act_on(const Hazard& hazard);
/// Both accesses in one line each.
std::string text_of(const Hazard& hazard);

/// Name the memory of a tensor: the name is in every site that touches it, until the memory is freed.
void name_tensor(const at::Tensor& tensor, std::string name);

/// A CPU tensor over the memory of a tensor on the device; nothing is noted.
at::Tensor host_view(const at::Tensor& tensor);
/// Fill a tensor's bytes with NaN, without noting an access.
void poison(const at::Tensor& tensor);

/// Keep storages, not tensors, in what outlives an operation: `.data = x` swaps the storage under a tensor.
void keep_until_host_knows(Clock clock, std::vector<c10::Storage> storages);

}  // namespace sim
