#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>

#include <array>
#include <atomic>
#include <mutex>

#include "runtime.h"

namespace sim {

namespace {

std::atomic<bool> separate{false};

/// A device's generator, which wraps a CPU generator.
struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(c10::DeviceIndex device, at::Generator own, bool is_default)
      : c10::GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        own_(std::move(own)),
        is_default_(is_default) {}

  static c10::DeviceType device_type() {
    return kSim;
  }

  at::Generator cpu() const {
    return is_default_ && !separate.load(std::memory_order_relaxed) ? at::detail::getDefaultCPUGenerator() : own_;
  }

  void set_current_seed(uint64_t seed) override {
    with_lock([&](at::Generator& cpu) { cpu.set_current_seed(seed); });
  }
  void set_offset(uint64_t offset) override {
    with_lock([&](at::Generator& cpu) { cpu.set_offset(offset); });
  }
  uint64_t get_offset() const override {
    return cpu().get_offset();
  }
  uint64_t current_seed() const override {
    return cpu().current_seed();
  }
  uint64_t seed() override {
    uint64_t seed = 0;
    with_lock([&](at::Generator& cpu) { seed = cpu.seed(); });
    return seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    with_lock([&](at::Generator& cpu) { cpu.unsafeGetGeneratorImpl()->set_state(state); });
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    c10::intrusive_ptr<c10::TensorImpl> state;
    with_lock([&](at::Generator& cpu) { state = cpu.unsafeGetGeneratorImpl()->get_state(); });
    return state;
  }

 private:
  SimGenerator* clone_impl() const override {
    return new SimGenerator(device_.index(), cpu().clone(), false);
  }

  template <typename Do>
  void with_lock(Do action) const {
    at::Generator generator = cpu();
    std::lock_guard<std::mutex> lock(generator.mutex());
    action(generator);
  }

  at::Generator own_;
  bool is_default_;
};

std::array<at::Generator, kMaxDevices>& default_generators() {
  static auto* all = [] {
    auto* made = new std::array<at::Generator, kMaxDevices>();
    for (int i = 0; i < kMaxDevices; ++i) {
      (*made)[i] =
          at::make_generator<SimGenerator>(static_cast<c10::DeviceIndex>(i), at::detail::createCPUGenerator(), true);
    }
    return made;
  }();
  return *all;
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  return default_generators().at(device < 0 ? current_device() : device);
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<SimGenerator>(
      device < 0 ? current_device() : device, at::detail::createCPUGenerator(), false);
}

void set_separate_generators(bool on) {
  if (on && !separate.load()) {
    const auto state = at::detail::getDefaultCPUGenerator().get_state();
    separate.store(true);
    for (auto& generator : default_generators()) {
      generator.set_state(state);
    }
  }
  separate.store(on);
}

bool separate_generators() {
  return separate.load();
}

std::optional<at::Generator> cpu_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex device) {
  if (generator && generator->defined()) {
    if (generator->device().type() != kSim) {
      return generator;
    }
    return generator->get<SimGenerator>()->cpu();
  }
  if (!separate.load(std::memory_order_relaxed)) {
    return std::nullopt;
  }
  return default_generator(device).get<SimGenerator>()->cpu();
}

}  // namespace sim
