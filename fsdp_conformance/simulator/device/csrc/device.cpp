// The device as torch sees it: guard, streams, events, hooks, generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>
#include <mutex>

#include "allocator.h"
#include "generator.h"
#include "gpu_trace.h"
#include "runtime.h"
#include "settle.h"
#include "sync_debug.h"
#include "torch_version.h"

#if !SIM_TORCH_AT_LEAST(2, 7)
#include <ATen/core/GeneratorForPrivateuseone.h>
#endif

// Which of these methods torch declares differs from version to version, so `override` is left out. A test turns it on,
// to check that every method overrides something in the installed torch.
#ifdef SIM_FORCE_OVERRIDE
#define SIM_OVERRIDE override
#else
#define SIM_OVERRIDE
#endif

namespace sim {

namespace {

/// What was recorded on a stream. Threads share it: one records a Work's event and another waits for it.
struct Event {
  std::mutex mutex;
  Clock clock;
  Mark mark;
  c10::Stream stream = c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, 0));
  std::chrono::steady_clock::time_point time;
  bool timed = false;
};

struct Recorded {
  Clock clock;
  Mark mark;
  c10::Stream stream;
};

Recorded recorded(void* event) {
  auto& known = *static_cast<Event*>(event);
  std::lock_guard<std::mutex> lock(known.mutex);
  return {known.clock, known.mark, known.stream};
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kSim, current_device());
    if (device.has_index()) {
      set_current_device(device.index());
    }
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kSim, current_device());
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      set_current_device(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() >= 0 && device.index() < num_devices()) {
      set_current_device(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return num_devices();
  }

  // These two must not throw (torch before 2.8 declares them noexcept), and a device that does not exist has only its
  // default stream anyway.
  c10::Stream getStream(c10::Device device) const noexcept override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority = false) const override {
    return new_stream_of_program(index_of(device), high_priority ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority = 0) const override {
    return new_stream_of_program(index_of(device), priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return set_current_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    if (!settled_until(Checker::get().snapshot(lane_of(stream)))) {
      return false;  // peers have yet to come
    }
    host_waits_stream(stream);  // everything has run, and a caller that is told so knows it
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    warn_or_fail_on_sync();
    host_waits_stream(stream);
    trace_host_wait(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const SIM_OVERRIDE {
    host_waits_device(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/, const c10::EventFlag flag)
      const override {
    if (*event == nullptr) {
      *event = new Event();
      traced(stream, [&](const auto& hooks) {
        hooks.trace_gpu_event_creation(c10::kCUDA, reinterpret_cast<uintptr_t>(*event));
      });
    }
    if (!keeps(Wait::EventRecord, stream)) {
      return;
    }
    auto& known = *static_cast<Event*>(*event);
    Clock clock = Checker::get().record(lane_of(stream));
    Mark mark;
    if (checking()) {
      mark = Checker::get().mark(lane_of(stream), here_without_waiting("event"));
    }
    {
      std::lock_guard<std::mutex> lock(known.mutex);
      known.clock = std::move(clock);
      std::swap(known.mark, mark);  // the earlier one is destroyed without the lock
      known.stream = stream;
      known.time = std::chrono::steady_clock::now();
      known.timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    }
    trace_record(*event, stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      const Recorded known = recorded(event);
      stream_waits(stream, known.clock, Wait::StreamWaitsEvent, known.mark);
      trace_wait(event, stream);
    }
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr && !settled_until(recorded(event).clock)) {
      return false;  // peers have yet to come
    }
    if (event != nullptr) {
      const Recorded known = recorded(event);
      host_waits(known.clock, known.stream, known.mark);  // it has happened, and a caller that is told so knows it
    }
    return true;
  }
  void synchronizeEvent(void* event) const SIM_OVERRIDE {
    if (event == nullptr) {
      return;
    }
    const Recorded known = recorded(event);
    host_waits(known.clock, known.stream, known.mark);
    traced(known.stream, [&](const auto& hooks) {
      hooks.trace_gpu_event_synchronization(c10::kCUDA, reinterpret_cast<uintptr_t>(event));
    });
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    if (event != nullptr) {
      traced(recorded(event).stream, [&](const auto& hooks) {
        hooks.trace_gpu_event_deletion(c10::kCUDA, reinterpret_cast<uintptr_t>(event));
      });
    }
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const SIM_OVERRIDE {
    return elapsed_time(first, second);
  }

#if __has_include(<c10/core/DeviceCapability.h>)
  /// All dtypes: it has the CPU's kernels.
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const SIM_OVERRIDE {
    return {};
  }
#endif

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const SIM_OVERRIDE {
    return true;
  }
  bool isAvailable() const SIM_OVERRIDE {
    return true;
  }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device < num_devices();
  }
  c10::DeviceIndex deviceCount() const SIM_OVERRIDE {
    return num_devices();
  }
  c10::DeviceIndex getCurrentDevice() const SIM_OVERRIDE {
    return current_device();
  }
  void setCurrentDevice(c10::DeviceIndex device) const SIM_OVERRIDE {
    set_current_device(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const SIM_OVERRIDE {
    const auto before = current_device();
    if (device >= 0) {
      set_current_device(device);
    }
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const SIM_OVERRIDE {
    return exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device = -1) const SIM_OVERRIDE {
    return new_generator(device);
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    const auto located = locate(static_cast<const void*>(data));
    TORCH_CHECK_VALUE(located && !located->pinned, "data must be an address in memory of sim, got ", data);
    return c10::Device(kSim, static_cast<c10::DeviceIndex>(located->device));
  }
  bool isPinnedPtr(const void* data) const override {
    const auto located = locate(data);
    return located && located->pinned;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_bytes(storage.unsafeGetStorageImpl(), nbytes);
  }
  /// Newer versions of torch call this; 2.13 and older call the op `_has_compatible_shallow_copy_type`. As on CUDA,
  /// `x.data = y` is allowed between the CPU and the device.
  bool hasCompatibleShallowCopyType(c10::DispatchKeySet /*from*/, c10::DispatchKeySet /*to*/) const {
    return true;
  }
};

}  // namespace

double elapsed_time(void* first, void* second) {
  TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded before calculating elapsed time.");
  if (first == second) {
    return 0;
  }
  auto& from = *static_cast<Event*>(first);
  auto& to = *static_cast<Event*>(second);
  std::scoped_lock lock(from.mutex, to.mutex);
  TORCH_CHECK(from.timed && to.timed, "both events must be created with enable_timing=True [Event.elapsed_time]");
  return std::chrono::duration<double, std::milli>(to.time - from.time).count();
}

void register_device() {
  // Never destroyed, because torch keeps the addresses.
  static const c10::impl::DeviceGuardImplRegistrar guard(kSim, new Guard());
  register_allocators();
  at::RegisterPrivateUse1HooksInterface(new Hooks());
#if !SIM_TORCH_AT_LEAST(2, 7)
  // The hooks are not asked for generators yet.
  at::_GeneratorRegister{new_generator};
#endif
}

}  // namespace sim
