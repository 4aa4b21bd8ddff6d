// A timer for DDP's statistics. DDP warns if the device has none.
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "runtime.h"

namespace sim {

namespace {

/// The host's clock, as for the CPU, because the host runs the operations.
class HostTimer final : public c10d::Timer {
 public:
  explicit HostTimer(c10::Device /*device*/) {}

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start);
    const auto to = getTimestamp(end);
    // An event that was not recorded in this iteration has an older time, or none.
    if (!from || !to || *to < *from) {
      return std::nullopt;
    }
    return *to - *from;
  }
};

}  // namespace

}  // namespace sim

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, sim::HostTimer);
}  // namespace c10d
