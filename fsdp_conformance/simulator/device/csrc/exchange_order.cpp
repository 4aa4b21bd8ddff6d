#include "exchange_order.h"

#include <algorithm>
#include <limits>

namespace sim {
namespace {

/// How many exchanges of a lane are kept before those that the host has waited for are dropped.
constexpr size_t kKept = 4096;

}  // namespace

ExchangeOrder& ExchangeOrder::get() {
  static auto* order = new ExchangeOrder();
  return *order;
}

uint64_t ExchangeOrder::next() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return next_;
}

uint64_t ExchangeOrder::waited_for(Lane lane) const {
  const Clock own = Checker::get().snapshot(lane);
  const Clock host = Checker::get().snapshot(kHost);
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t first = next_;
  for (const auto& [other, exchanges] : unfinished_) {
    const uint64_t known = std::max(time_of(own, other), time_of(host, other));
    const auto later = std::upper_bound(
        exchanges.begin(), exchanges.end(), known, [](uint64_t tick, const Exchange& one) { return tick < one.tick; });
    if (later != exchanges.end()) {
      first = std::min(first, later->number);
    }
  }
  return first;
}

void ExchangeOrder::issued(Lane lane) {
  // Without the checker streams have no clocks: nothing counts as waited for, so nothing is reported.
  const bool has_clocks = Checker::get().mode() != Mode::Off;
  const uint64_t tick =
      has_clocks ? time_of(Checker::get().snapshot(lane), lane) : std::numeric_limits<uint64_t>::max();
  const uint64_t finished = time_of(Checker::get().snapshot(kHost), lane);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& exchanges = unfinished_[lane];
  if (exchanges.size() >= kKept) {
    drop_finished(exchanges, finished);
  }
  exchanges.push_back({tick, next_++});
}

void ExchangeOrder::drop_finished(std::vector<Exchange>& of_lane, uint64_t tick) {
  const auto first = std::find_if(of_lane.begin(), of_lane.end(), [&](const Exchange& one) { return one.tick > tick; });
  of_lane.erase(of_lane.begin(), first);
}

}  // namespace sim
