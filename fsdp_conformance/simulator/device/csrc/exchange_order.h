// The exchanges of this process in the order in which they were issued, and which of them a stream has waited for.
//
// A kernel of a collective that waits for its peers holds up everything that its stream, or a stream that waits for it,
// runs next. Whether two ranks can wait for each other on their devices therefore follows from what each exchange runs
// after, on each of them (collectives/device_order.py).
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "checker.h"

namespace sim {

class ExchangeOrder {
 public:
  static ExchangeOrder& get();
  /// The number of the exchange that is issued next. The messages of a batch share one number: they run together.
  uint64_t next() const;
  /// All exchanges with smaller numbers have finished before whatever is put on the lane next runs.
  uint64_t waited_for(Lane lane) const;
  /// An exchange has been put on the lane, as its last operation.
  void issued(Lane lane);

 private:
  struct Exchange {
    uint64_t tick;
    uint64_t number;
  };

  /// Forget those at the front that the host has waited for: everything that is issued from now on runs after them.
  void drop_finished(std::vector<Exchange>& of_lane, uint64_t tick);

  mutable std::mutex mutex_;
  uint64_t next_ = 0;
  std::map<Lane, std::vector<Exchange>> unfinished_;  // in the order of their ticks
};

}  // namespace sim
