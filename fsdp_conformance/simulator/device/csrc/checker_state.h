// The state behind the checker's lock: lanes, blocks with the history of their accesses, and the hazards found.
//
// For the checker's own files only.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <unordered_map>

#include "checker.h"

namespace sim {

/// A clock's entry for a lane, which is 0 if the clock did not have one.
inline uint64_t& entry_of(Clock& clock, Lane lane) {
  const auto index = static_cast<size_t>(lane);
  if (clock.size() <= index) {
    clock.resize(index + 1, 0);
  }
  return clock[index];
}

/// One allocation of a block, until it is freed.
struct Tenant {
  uint64_t allocation = 0;
  Lane lane = kHost;
  uint64_t block_number = 0;
  uint64_t bytes = 0;
  SitePtr allocated;
  SitePtr freed;
  /// For a lane, the tick up to which later tenants need not wait for its accesses, because a hazard was reported.
  std::vector<std::pair<Lane, uint64_t>> excused;

  bool excuses(Lane of, uint64_t tick) const {
    return std::any_of(
        excused.begin(), excused.end(), [&](const auto& entry) { return entry.first == of && tick <= entry.second; });
  }

  void excuse(Lane of, uint64_t tick) {
    for (auto& entry : excused) {
      if (entry.first == of) {
        entry.second = std::max(entry.second, tick);
        return;
      }
    }
    excused.emplace_back(of, tick);
  }
};

/// An access in a history.
struct Entry {
  int64_t begin;
  int64_t end;
  uint64_t tick;
  Lane lane;
  Kind kind;
  Extent extent;  // normalized
  SitePtr site;
  std::shared_ptr<Tenant> tenant;
  uint64_t order = 0;  // in the order of the program, over all lanes

  Access access() const {
    return {kind, lane, tick, extent, site, tenant->allocation};
  }
};

struct Block {
  uint64_t number = 0;  // within its device
  uint64_t bytes = 0;
  int32_t device = 0;
  bool pinned = false;
  bool live = false;
  uint64_t allocations = 0;
  std::shared_ptr<Tenant> tenant;
  std::vector<Lane> recorded;
  std::vector<Entry> history;
  /// Reuse::WorstCase: the last unfinished access of each lane and kind to other memory that this tenant could have
  /// been given.
  std::vector<Entry> inherited;
  /// ... and, while the block is free, to its own memory.
  std::vector<Entry> unfinished;
  std::vector<Unwritten> unwritten;  // by address, without overlaps
};

/// A wait of a lane.
struct NotedWait {
  Mark mark;
  Clock clock;
  uint64_t order = 0;
  SitePtr waited;
};

/// A wait of the host that the program did not ask for: the clock of the lane that it waited for, and who waited.
struct ImplicitWait {
  Clock clock;
  SitePtr site;
  uint64_t order = 0;
};

struct LaneState {
  std::string name;
  int32_t device = 0;
  int32_t number = 0;
  Clock clock;
  std::deque<NotedWait> waits;  // the last ones
  // Since the order digest was started:
  uint64_t ticks_before = 0;
  uint64_t digest_number = 0;  // in the order of first access, from 1; 0 before that
  std::vector<SitePtr> made;   // where the program made the stream, the last times
};

/// A checksum of what the accesses of a device knew about its streams.
struct Digest {
  uint64_t sum = 0;
  uint64_t lanes = 0;

  void add(uint64_t value) {
    // The finalizer of splitmix64 (Steele, Lea, Flood 2014), applied to the sum so far plus the new value.
    sum += value + 0x9e3779b97f4a7c15;
    sum = (sum ^ (sum >> 30)) * 0xbf58476d1ce4e5b9;
    sum = (sum ^ (sum >> 27)) * 0x94d049bb133111eb;
    sum ^= sum >> 31;
  }
};

using PoolKey = std::pair<Lane, bool>;  // allocation lane, small

/// Free blocks of one size that have unfinished accesses, for Reuse::WorstCase.
struct SizeClass {
  std::set<BlockId> blocks;
  std::vector<const Entry*> last;  // of each lane and kind, over all blocks; points into their `unfinished`
  bool stale = false;
};

/// What a thread of the host knows.
struct HostState {
  Clock clock = {1};
  Clock waited;  // what it has waited for explicitly; only kept with Waits::Explicit
};

struct Checker::State {
  mutable std::mutex mutex;
  std::atomic<Mode> mode{Mode::Off};
  std::atomic<Reuse> reuse{Reuse::Exact};
  std::atomic<Waits> waits{Waits::All};
  std::atomic<uint64_t> accesses{0};
  std::atomic<bool> tracks_unwritten{false};
  std::atomic<size_t> num_unwritten{0};  // blocks with unwritten bytes
  uint64_t order = 0;                    // of accesses, events and waits

  std::vector<LaneState> lanes;
  std::map<HostThread, HostState> hosts;  // those that live
  HostThread last_host = kMainThread;
  std::deque<ImplicitWait> implicit_waits;  // the last ones
  std::map<int32_t, int32_t> lanes_of_device;
  std::map<int32_t, uint64_t> blocks_of_device;
  bool digests_order = false;
  std::map<int32_t, Digest> digests;
  std::unordered_map<BlockId, Block> blocks;
  BlockId last_block = 0;
  std::map<PoolKey, std::map<uint64_t, SizeClass>> pools;  // by rounded size

  std::vector<Hazard> deferred;  // not in `hazards` yet
  std::vector<Hazard> hazards;
  std::map<std::string, size_t> folded;  // what makes two hazards equal -> index in `hazards`

  /// What is removed under the lock and destroyed after it: declare it before the lock, so that it outlives the lock.
  struct Trash {
    std::vector<Entry> entries;
    std::vector<std::shared_ptr<Tenant>> tenants;
    std::vector<SitePtr> sites;
    std::vector<Unwritten> unwritten;
    std::deque<NotedWait> waits;
    std::deque<ImplicitWait> implicit_waits;
  };

  LaneState& lane(Lane lane) {
    if (lane < 0 || static_cast<size_t>(lane) >= lanes.size()) {
      throw std::out_of_range("lane must be below " + std::to_string(lanes.size()) + ", got " + std::to_string(lane));
    }
    return lanes[static_cast<size_t>(lane)];
  }

  Block& block(BlockId id) {
    const auto found = blocks.find(id);
    if (found == blocks.end()) {
      throw std::out_of_range("block must be one that add_block() returned, got " + std::to_string(id));
    }
    return found->second;
  }

  HostState& this_host() {
    const auto found = hosts.find(host_thread());
    return found == hosts.end() ? hosts.at(kMainThread) : found->second;
  }

  Clock& host() {
    return this_host().clock;
  }

  Clock& clock_of(Lane of) {
    return of == kHost ? host() : lane(of).clock;
  }

  bool host_knows(const Entry& entry) {
    return time_of(host(), entry.lane) >= entry.tick;
  }

  bool all_hosts_know(const Entry& entry) {
    return std::all_of(hosts.begin(), hosts.end(), [&](const auto& thread) {
      return time_of(thread.second.clock, entry.lane) >= entry.tick;
    });
  }

  const Clock& submitted_with(const HostState& thread) const {
    return waits.load() == Waits::All ? thread.clock : thread.waited;
  }

  /// What every operation knows that this thread of the host submits.
  const Clock& submitted_with() {
    return submitted_with(this_host());
  }

  /// Whether everything that the host submits from now on, in any thread, comes after an access.
  bool is_over(const Entry& entry) {
    return std::all_of(hosts.begin(), hosts.end(), [&](const auto& thread) {
      return time_of(submitted_with(thread.second), entry.lane) >= entry.tick;
    });
  }

  /// Keep the entries of a history for which `keep` is true, in order; move the others to the trash.
  template <class Keep>
  static void filter(std::vector<Entry>& entries, Trash& trash, Keep keep) {
    size_t kept = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!keep(entries[i])) {
        trash.entries.push_back(std::move(entries[i]));
      } else {
        if (kept != i) {
          entries[kept] = std::move(entries[i]);
        }
        ++kept;
      }
    }
    entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(kept), entries.end());  // these have been moved from
  }

  static void throw_away(std::vector<Entry>& entries, Trash& trash) {
    std::move(entries.begin(), entries.end(), std::back_inserter(trash.entries));
    entries.clear();
  }

  // Reuse in the worst case (checker_reuse.cpp).
  /// Keep the freed block's unfinished accesses for the allocations that could be given its memory.
  void offer(BlockId id, Block& block);
  /// The block's memory is no longer free.
  void take_from_pool(BlockId id, const Block& block);
  /// Give the new tenant of `block` the unfinished accesses of all memory that it could have been given instead.
  void inherit(Block& block, Trash& trash);

  // The steps of Checker::access (checker_accesses.cpp).
  /// Enter the lane's current operation and the block's tenant into the access.
  void stamp(Entry& now, const Block& block);
  /// Add what the lane of the access knows about the other lanes to the order digest.
  void digest(const Entry& now, int32_t device);
  /// The accesses that conflict with `now` and are not ordered before it: the last of each lane, by lane.
  std::vector<const Entry*> racing(const Block& block, const Entry& now);
  /// For each reason why a wait may not order the two, the last wait of that kind.
  std::vector<UselessWait> useless_waits(const Entry& then, const Entry& now);
  std::optional<Useless> why_useless(const NotedWait& wait, const Entry& then, const Entry& now);
  /// Whether a wait of another lane than that of `now` is for `then`.
  std::optional<Useless> for_another_lane(const NotedWait& wait, Lane waiter, const Entry& then, const Entry& now);
  /// The host's first implicit wait after an access that covers it; null if there is none, or no longer.
  SitePtr implicit_wait_for(const Entry& then);
  /// Replace the unwritten bytes of a block.
  void set_unwritten(Block& block, std::vector<Unwritten> bytes, Trash& trash);
  /// From now on the missing wait counts as made.
  void assume_ordered(const Entry& then, const Entry& now);
  /// Drop the accesses that no later access has to be compared with, now that `now` has happened. Only an access that
  /// `stays` in the history stands for those before it.
  void prune(Block& block, const Entry& now, bool stays, Trash& trash);
  /// Enter new hazards into the list, equal ones with a count. Takes the lock; the caller must not hold it.
  void fold(std::vector<Hazard>& found);

 private:
  std::map<uint64_t, SizeClass>& pool_of(const Block& block);
  void put_into_pool(BlockId id, const Block& block);
  void refresh(SizeClass& size);
  void add_last(std::vector<const Entry*>& last, const Entry& entry);
  std::string lane_name(Lane lane);
  std::string key_of(const Hazard& hazard);
};

}  // namespace sim
