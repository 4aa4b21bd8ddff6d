#include "runtime.h"

#include <array>
#include <atomic>
#include <mutex>
#include <numeric>

#include "allocator.h"
#include "gpu_trace.h"
#include "pinned.h"
#include "settle.h"

namespace sim {

namespace {

constexpr int kPool = 32;                // streams per priority and device, as on CUDA
constexpr int kStreams = 1 + 2 * kPool;  // the default stream and two pools

struct DeviceStreams {
  std::array<std::atomic<Lane>, kStreams> lanes;
  // Where the program made each stream, the last two times, under `new_lane_mutex`.
  std::array<std::vector<SitePtr>, kStreams> made;
  std::atomic<uint32_t> handed_out[2] = {{0}, {0}};
  DeviceStreams() {
    for (auto& lane : lanes) {
      lane.store(-1, std::memory_order_relaxed);
    }
  }
};

// Never destroyed: torch's threads may ask for streams while the process exits.
std::array<DeviceStreams, kMaxDevices + 1>& streams() {
  static auto* all = new std::array<DeviceStreams, kMaxDevices + 1>();
  return *all;
}

std::mutex& new_lane_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

std::atomic<int> device_count{8};

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<int8_t, kMaxDevices + 1> this_stream{};  // ids are below 65

struct Filter {
  std::mutex mutex;
  std::shared_ptr<const WaitFilter> filter;
  std::atomic<bool> set{false};
};
Filter& wait_filter() {
  static auto* filter = new Filter();
  return *filter;
}

}  // namespace

bool keeps(Wait why, c10::Stream stream) {
  Filter& current = wait_filter();
  if (!current.set.load(std::memory_order_acquire)) {
    return true;
  }
  std::shared_ptr<const WaitFilter> filter;
  {
    std::lock_guard<std::mutex> lock(current.mutex);
    filter = current.filter;
  }
  return !filter || (*filter)(why, stream);
}

namespace {

bool has_device(c10::DeviceIndex index) {
  return index >= 0 && index < num_devices();
}

std::string no_device(c10::DeviceIndex index) {
  return c10::str(
      "device index must be in [0, ", static_cast<int>(num_devices()),
      "), the number of simulated devices (FSDP_CONFORMANCE_SIM_DEVICES), got ", static_cast<int>(index));
}

}  // namespace

c10::DeviceIndex num_devices() {
  return static_cast<c10::DeviceIndex>(device_count.load(std::memory_order_relaxed));
}

void set_num_devices(int count) {
  TORCH_CHECK_VALUE(count > 0 && count <= kMaxDevices, "num_devices must be in [1, ", kMaxDevices, "], got ", count);
  device_count.store(count, std::memory_order_relaxed);
}

c10::DeviceIndex current_device() {
  return this_device;
}

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK_VALUE(has_device(device), no_device(device));
  this_device = device;
}

c10::DeviceIndex index_of(c10::Device device) {
  const auto index = device.has_index() ? device.index() : this_device;
  TORCH_CHECK_VALUE(has_device(index), no_device(index));
  return index;
}

c10::Stream default_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, device));
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) {
    device = this_device;
  }
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), this_stream.at(device));
}

c10::Stream set_current_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device_index());
  this_stream.at(before.device_index()) = static_cast<int8_t>(stream.id());
  return before;
}

c10::Stream new_stream(c10::DeviceIndex device, int priority) {
  if (device < 0) {
    device = this_device;
  }
  const int pool = priority < 0 ? 1 : 0;
  const uint32_t number = streams().at(device).handed_out[pool].fetch_add(1, std::memory_order_relaxed) % kPool;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), 1 + pool * kPool + static_cast<int>(number));
}

c10::Stream new_stream_of_program(c10::DeviceIndex device, int priority) {
  const auto stream = new_stream(device, priority);
  const SitePtr site = here("stream");
  auto& all = streams().at(stream.device_index());
  std::lock_guard<std::mutex> lock(new_lane_mutex());
  auto& made = all.made.at(stream.id());
  if (made.size() == 2) {
    made.erase(made.begin());
  }
  made.push_back(site);
  if (const Lane lane = all.lanes.at(stream.id()).load(std::memory_order_acquire); lane >= 0) {
    Checker::get().set_lane_made(lane, made);
  }
  return stream;
}

int priority_of(c10::Stream stream) {
  return stream.id() > kPool ? -1 : 0;
}

Lane lane_of(c10::Stream stream) {
  auto& lane = streams().at(stream.device_index()).lanes.at(stream.id());
  Lane known = lane.load(std::memory_order_acquire);
  if (known >= 0) {
    return known;
  }
  std::lock_guard<std::mutex> lock(new_lane_mutex());
  known = lane.load(std::memory_order_acquire);
  if (known < 0) {
    known = Checker::get().add_lane(stream.id() == 0 ? "default stream" : "stream", stream.device_index());
    Checker::get().set_lane_made(known, streams().at(stream.device_index()).made.at(stream.id()));
    lane.store(known, std::memory_order_release);
  }
  return known;
}

const char* name_of(Wait wait) {
  switch (wait) {
    case Wait::StreamWaitsEvent:
      return "stream_waits_event";
    case Wait::HostWaitsEvent:
      return "host_waits_event";
    case Wait::HostWaitsStream:
      return "host_waits_stream";
    case Wait::HostWaitsDevice:
      return "host_waits_device";
    case Wait::WorkWait:
      return "work_wait";
    case Wait::RecordStream:
      return "record_stream";
    case Wait::EventRecord:
      return "event_record";
    case Wait::CollectiveIssue:
      return "collective_issue";
  }
  return "unknown";
}

void set_wait_filter(WaitFilter filter) {
  auto next = filter ? std::make_shared<const WaitFilter>(std::move(filter)) : nullptr;
  Filter& current = wait_filter();
  {
    std::lock_guard<std::mutex> lock(current.mutex);
    std::swap(current.filter, next);
    current.set.store(current.filter != nullptr, std::memory_order_release);
  }
  // The previous filter is destroyed here, outside the lock, because it may be a Python object.
}

namespace {

/// Note a wait of the program's, to explain hazards.
void note_wait(Lane lane, const Clock& clock, const Mark& mark) {
  if (checking()) {
    Checker::get().note_wait(lane, clock, mark, here_without_waiting("wait"));
  }
}

}  // namespace

void stream_waits(c10::Stream stream, const Clock& clock, Wait why, const Mark& mark) {
  if (keeps(why, stream)) {
    Checker::get().wait(lane_of(stream), clock);
    if (mark.site) {
      note_wait(lane_of(stream), clock, mark);
    }
  }
}

void host_waits(const Clock& clock, c10::Stream recorded_on, const Mark& mark) {
  if (!keeps(Wait::HostWaitsEvent, recorded_on)) {
    return;
  }
  settle_until(clock);
  before_host_wait();
  Checker::get().host_wait(clock);
  if (mark.site) {
    note_wait(kHost, clock, mark);
  }
  after_host_wait();
}

void host_waits_stream(c10::Stream stream, const SitePtr& implicit) {
  if (!keeps(Wait::HostWaitsStream, stream)) {
    return;
  }
  const Clock clock = Checker::get().snapshot(lane_of(stream));
  settle_until(clock);
  before_host_wait();
  Checker::get().host_wait_lane(lane_of(stream), implicit);
  if (!implicit) {
    note_wait(kHost, clock, Checker::get().mark(lane_of(stream), nullptr));
  } else {
    trace_host_wait(stream);
  }
  after_host_wait();
}

void host_waits_device(c10::DeviceIndex device) {
  if (device < 0) {
    device = this_device;
  }
  if (!keeps(Wait::HostWaitsDevice, default_stream(device))) {
    return;
  }
  settle_device(device);
  before_host_wait();
  Checker::get().host_wait_device(device);
  note_wait(kHost, {}, Checker::get().mark(kHost, nullptr, device));
  after_host_wait();
  traced(default_stream(device), [](const auto& hooks) { hooks.trace_gpu_device_synchronization(c10::kCUDA); });
}

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  if (!keeps(Wait::RecordStream, stream)) {
    return;
  }
  if (auto located = locate(data)) {
    Checker::get().record_stream(located->block, lane_of(stream));
  }
}

namespace {
thread_local const SitePtr* running = nullptr;
}

Operation::Operation(const SitePtr* site) : outer_(running) {
  running = site;
}
Operation::~Operation() {
  running = outer_;
}
const SitePtr* Operation::current() {
  return running;
}

Extent extent_of(const at::Tensor& tensor) {
  Extent extent;
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  extent.offset = tensor.storage_offset() * itemsize;
  extent.run = itemsize;
  if (tensor.is_contiguous()) {
    extent.run = tensor.numel() * itemsize;
    return extent;
  }
  c10::SmallVector<int64_t, 6> dims(tensor.dim());
  std::iota(dims.begin(), dims.end(), 0);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });
  for (const auto dim : dims) {
    const auto stride = strides[dim] * itemsize;
    const auto count = sizes[dim];
    if (count == 1 || stride == 0) {
      continue;
    }
    if (extent.repeats.empty() && stride <= extent.run) {
      extent.run += (count - 1) * stride;  // the next run begins before this one ends, so they make one run
    } else {
      extent.repeats.emplace_back(count, stride);
    }
  }
  std::reverse(extent.repeats.begin(), extent.repeats.end());
  return extent;
}

namespace {

/// "default stream", "stream 3", "stream 3 (all-gather)", "host"
std::string text_of(Lane lane) {
  const Checker& checker = Checker::get();
  const std::string name = checker.lane_name(lane);
  if (lane == kHost || checker.lane_number(lane) == 0 || name == "default stream") {
    return name;
  }
  const std::string numbered = "stream " + std::to_string(checker.lane_number(lane));
  return name == "stream" ? numbered : numbered + " (" + name + ")";
}

std::string text_of(const Access& access) {
  std::string text = access.site ? access.site->op : "an operation";
  if (access.site && !access.site->label.empty()) {
    text += " in " + access.site->label;
  }
  if (access.site && !access.site->tensor.empty()) {
    text += " of " + access.site->tensor;
  }
  return text + " on " + text_of(access.lane);
}

const char* name_of(HazardKind kind) {
  switch (kind) {
    case HazardKind::ReadAfterWrite:
      return "read after write";
    case HazardKind::WriteAfterRead:
      return "write after read";
    case HazardKind::WriteAfterWrite:
      return "write after write";
    case HazardKind::ReuseInFlight:
      return "reuse of memory in flight";
    case HazardKind::HostWriteInFlight:
      return "host write in flight";
    case HazardKind::HostReadInFlight:
      return "host read in flight";
    case HazardKind::UninitializedRead:
      return "use of uninitialized memory";
  }
  return "hazard";
}

}  // namespace

std::string text_of(const Hazard& hazard) {
  const bool unwritten = hazard.kind == HazardKind::UninitializedRead;
  std::string text = std::string(name_of(hazard.kind)) + ": " + text_of(hazard.now) +
      (unwritten ? " uses what nothing has written" : " does not wait for " + text_of(hazard.then));
  text += " [block " + std::to_string(hazard.block) + " of " + std::to_string(hazard.bytes) + " bytes, device " +
      std::to_string(hazard.device) + "]";
  return text;
}

bool act_on(const Hazard& hazard) {
  const Mode mode = Checker::get().mode();
  TORCH_CHECK(mode != Mode::Raise, text_of(hazard));
  return mode == Mode::Poison;
}

std::optional<Bytes> bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) {
    return std::nullopt;
  }
  const auto& data = tensor.storage().data_ptr();
  const auto located = locate(data);
  if (!located) {
    return std::nullopt;
  }
  Extent extent = extent_of(tensor);
  extent.offset += static_cast<const char*>(data.get()) - located->begin;
  return Bytes{located->block, std::move(extent)};
}

SitePtr with_name(const SitePtr& site, BlockId block) {
  auto name = name_of(block);
  if (name.empty() || !site) {
    return site;
  }
  auto copy = std::make_shared<Site>(*site);
  copy->tensor = std::move(name);
  return copy;
}

bool note_access(const at::Tensor& tensor, Kind kind, Lane lane, const SitePtr& site, bool finished) {
  if (!checking()) {
    return false;
  }
  const auto bytes = bytes_of(tensor);
  if (!bytes) {
    return false;
  }
  const auto hazard =
      Checker::get().access(bytes->block, kind, bytes->extent, lane, with_name(site, bytes->block), finished);
  if (kind == Kind::Write) {
    Checker::get().written(bytes->block, bytes->extent);
  }
  return hazard && act_on(*hazard);
}

bool note_access(const at::Tensor& tensor, Kind kind, c10::Stream stream, const SitePtr& site, bool finished) {
  return note_access(tensor, kind, lane_of(stream), site, finished);
}

void name_tensor(const at::Tensor& tensor, std::string name) {
  const auto located = locate(tensor.storage().data_ptr());
  TORCH_CHECK_VALUE(
      located, "tensor must have memory on sim or pinned memory, got one on ", tensor.device(), " [name_tensor]");
  set_name(located->block, std::move(name));
}

}  // namespace sim
