// An access: compared with the history of its block, reported where it races, and added to the history.
#include "checker_state.h"

namespace sim {
namespace {

inline bool conflict(const Entry& then, const Entry& now) {
  return then.kind == Kind::Write || now.kind == Kind::Write;
}

/// Whether `now` waits for `then`, or need not wait for it. `clock` is that of the lane of `now`.
inline bool is_ordered(const Entry& then, const Entry& now, const Clock& clock) {
  return time_of(clock, then.lane) >= then.tick ||
      (then.tenant != now.tenant && then.tenant->excuses(then.lane, then.tick));
}

/// Of each lane keep the last.
inline void add_racing(std::vector<const Entry*>& racing, const Entry& then) {
  for (const Entry*& other : racing) {
    if (other->lane == then.lane) {
      other = other->tick < then.tick ? &then : other;
      return;
    }
  }
  racing.push_back(&then);
}

HazardKind kind_of(const Entry& then, const Entry& now) {
  if (then.tenant != now.tenant) {
    return HazardKind::ReuseInFlight;
  }
  if (now.lane == kHost) {
    return now.kind == Kind::Write ? HazardKind::HostWriteInFlight : HazardKind::HostReadInFlight;
  }
  if (now.kind == Kind::Read) {
    return HazardKind::ReadAfterWrite;
  }
  return then.kind == Kind::Read ? HazardKind::WriteAfterRead : HazardKind::WriteAfterWrite;
}

Hazard hazard_of(const Block& block, const Entry& then, const Entry& now) {
  Hazard hazard;
  hazard.kind = kind_of(then, now);
  hazard.then = then.access();
  hazard.now = now.access();
  hazard.block = block.number;
  hazard.bytes = block.bytes;
  hazard.device = block.device;
  hazard.pinned = block.pinned;
  hazard.allocated = now.tenant->allocated;
  hazard.freed = then.tenant->freed;
  hazard.tenant_lane = then.tenant->lane;
  hazard.then_block = then.tenant->block_number;
  hazard.then_bytes = then.tenant->bytes;
  hazard.count = 1;
  return hazard;
}

std::string text_of(const std::vector<Frame>& frames) {
  std::string text;
  for (const Frame& frame : frames) {
    text += frame.file + '\x1f' + std::to_string(frame.line) + '\x1f' + frame.function + '\x1e';
  }
  return text;
}

std::string text_of(const SitePtr& site) {
  if (!site) {
    return "\x1d";
  }
  return site->op + '\x1f' + site->label + '\x1f' + (site->stack ? text_of(site->stack->frames()) : "") + '\x1d';
}

}  // namespace

std::optional<Hazard> Checker::access(
    BlockId id, Kind kind, const Extent& extent, Lane lane, const SitePtr& site, bool finished) {
  auto found = compare(id, kind, extent, lane, site, finished);
  if (found.empty()) {
    return std::nullopt;
  }
  state_->fold(found);
  return found.front();
}

std::optional<Hazard> Checker::access_without_waiting(
    BlockId id, Kind kind, const Extent& extent, Lane lane, const SitePtr& site) {
  const auto found = compare(id, kind, extent, lane, site, false);
  if (found.empty()) {
    return std::nullopt;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::copy(found.begin(), found.end(), std::back_inserter(state_->deferred));
  return found.front();
}

void Checker::fold_deferred() const {
  std::vector<Hazard> found;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    found = std::exchange(state_->deferred, {});
  }
  state_->fold(found);
}

/// The hazards of an access, one for each stream that it does not wait for.
std::vector<Hazard> Checker::compare(
    BlockId id, Kind kind, const Extent& extent, Lane lane, const SitePtr& site, bool finished) {
  if (suspended() || state_->mode.load() == Mode::Off) {
    return {};
  }
  Entry now{0, 0, 0, lane, kind, normalized(extent), site, nullptr, 0};
  if (now.extent.run <= 0) {
    return {};
  }
  now.begin = now.extent.offset;
  now.end = end_of(now.extent);
  state_->accesses.fetch_add(1, std::memory_order_relaxed);

  std::vector<Hazard> found;
  {
    State::Trash trash;
    const std::lock_guard<std::mutex> lock(state_->mutex);
    Block& block = state_->block(id);
    state_->stamp(now, block);
    if (state_->digests_order) {
      state_->digest(now, block.device);
    }
    for (const Entry* then : state_->racing(block, now)) {
      found.push_back(hazard_of(block, *then, now));
      found.back().useless_waits = state_->useless_waits(*then, now);
      found.back().hidden_by = state_->implicit_wait_for(*then);
      state_->assume_ordered(*then, now);
    }
    // What the host does itself is finished before the host submits anything else: no later access can race with it.
    const bool stays = lane != kHost && !finished;
    state_->prune(block, now, stays, trash);
    if (stays) {
      block.history.push_back(std::move(now));
    }
  }
  return found;
}

void Checker::State::stamp(Entry& now, const Block& block) {
  now.tick = time_of(clock_of(now.lane), now.lane);
  now.tenant = block.tenant;
  now.order = ++order;
  if (now.tick == 0) {
    throw std::logic_error("access on lane " + std::to_string(now.lane) + " before any submit()");
  }
}

void Checker::State::digest(const Entry& now, int32_t device) {
  Digest& digest = digests[device];
  LaneState& own = lane(now.lane);
  if (own.digest_number == 0 && now.lane != kHost) {
    own.digest_number = ++digest.lanes;
  }
  digest.add(own.digest_number * 2 + static_cast<uint64_t>(now.kind));
  std::vector<uint64_t> known(digest.lanes + 1, 0);  // [0]: of streams without an access so far, summed up
  for (size_t other = 1; other < lanes.size(); ++other) {
    const uint64_t ticks = time_of(clock_of(now.lane), static_cast<Lane>(other));
    if (lanes[other].device == device && ticks > lanes[other].ticks_before) {
      known[lanes[other].digest_number] += ticks - lanes[other].ticks_before;
    }
  }
  for (const uint64_t ticks : known) {
    digest.add(ticks);
  }
}

std::vector<const Entry*> Checker::State::racing(const Block& block, const Entry& now) {
  const Clock& clock = clock_of(now.lane);
  std::vector<const Entry*> found;
  for (const Entry& then : block.history) {
    // In memory of the host, an implicit wait orders what it is there for: the copy has arrived, or has been taken.
    if (block.pinned && waits.load() == Waits::Explicit && host_knows(then)) {
      continue;
    }
    if (conflict(then, now) && then.begin < now.end && now.begin < then.end && !is_ordered(then, now, clock) &&
        overlap_of_normalized(then.extent, now.extent)) {
      add_racing(found, then);
    }
  }
  // It is open where the two tenants would lie in memory that they could have shared, so any bytes of theirs conflict.
  for (const Entry& then : block.inherited) {
    if (conflict(then, now) && !is_ordered(then, now, clock)) {
      add_racing(found, then);
    }
  }
  std::sort(found.begin(), found.end(), [](const Entry* a, const Entry* b) { return a->lane < b->lane; });
  return found;
}

std::vector<UselessWait> Checker::State::useless_waits(const Entry& then, const Entry& now) {
  std::map<Useless, std::pair<const NotedWait*, Lane>> last;
  for (Lane waiter = 0; waiter < static_cast<Lane>(lanes.size()); ++waiter) {
    // What the host has waited for, the lane knows too.
    const bool is_for_now = waiter == now.lane || waiter == kHost;
    for (const NotedWait& wait : lane(waiter).waits) {
      const auto why = is_for_now ? why_useless(wait, then, now) : for_another_lane(wait, waiter, then, now);
      if (!why) {
        continue;
      }
      auto& [known, by] = last.emplace(*why, std::make_pair(&wait, waiter)).first->second;
      if (known->order < wait.order) {
        known = &wait;
        by = waiter;
      }
    }
  }
  std::vector<UselessWait> result;
  for (const auto& [why, found] : last) {
    result.push_back({why, found.first->mark, found.second, found.first->waited});
  }
  return result;
}

std::optional<Useless> Checker::State::why_useless(const NotedWait& wait, const Entry& then, const Entry& now) {
  const Mark& mark = wait.mark;
  const bool of_device = mark.device >= 0;
  const bool of_right_one = of_device ? mark.device == lane(then.lane).device : mark.lane == then.lane;
  if (wait.order > now.order) {
    return std::nullopt;
  }
  if (wait.order < then.order) {
    return of_right_one ? std::make_optional(Useless::WaitsTooEarly) : std::nullopt;
  }
  if (of_device) {
    return of_right_one ? std::nullopt : std::make_optional(Useless::OtherDevice);
  }
  const bool covers = time_of(wait.clock, then.lane) >= then.tick;
  const bool before = mark.order < then.order;
  if (covers || (of_right_one && !before)) {
    return std::nullopt;
  }
  return of_right_one ? Useless::RecordedTooEarly : before ? Useless::OtherEvent : Useless::OtherStream;
}

std::optional<Useless> Checker::State::for_another_lane(
    const NotedWait& wait, Lane waiter, const Entry& then, const Entry& now) {
  const bool between = then.order < wait.order && wait.order < now.order;
  const bool helps = wait.mark.lane == then.lane && time_of(wait.clock, then.lane) >= then.tick;
  return between && helps && waiter != then.lane ? std::make_optional(Useless::OtherWaiter) : std::nullopt;
}

void Checker::State::assume_ordered(const Entry& then, const Entry& now) {
  if (then.tenant != now.tenant) {
    // record_stream would have ordered these accesses and nothing else.
    then.tenant->excuse(then.lane, then.tick);
  } else if (now.lane != kHost) {
    uint64_t& known = entry_of(lane(now.lane).clock, then.lane);
    known = std::max(known, then.tick);
  }
}

void Checker::State::prune(Block& block, const Entry& now, bool stays, Trash& trash) {
  const Clock& clock = clock_of(now.lane);
  const bool writes = now.kind == Kind::Write;
  filter(block.history, trash, [&](const Entry& then) {
    if (block.pinned ? all_hosts_know(then) : is_over(then)) {
      return false;
    }
    if (!stays || now.begin > then.begin || then.end > now.end || !covers(now.extent, then.extent)) {
      return true;
    }
    const bool same_kind = then.lane == now.lane && then.kind == now.kind;
    return !same_kind && !(writes && is_ordered(then, now, clock));
  });
  const bool whole = now.begin <= 0 && static_cast<uint64_t>(now.end) >= block.bytes && now.extent.repeats.empty();
  filter(block.inherited, trash, [&](const Entry& then) {
    return !is_over(then) && !(stays && writes && whole && is_ordered(then, now, clock));
  });
}

SitePtr Checker::State::implicit_wait_for(const Entry& then) {
  for (const ImplicitWait& wait : implicit_waits) {
    if (wait.order > then.order && time_of(wait.clock, then.lane) >= then.tick) {
      return wait.site;
    }
  }
  return nullptr;
}

std::string Checker::State::lane_name(Lane of) {
  const std::lock_guard<std::mutex> lock(mutex);
  return lane(of).name;
}

/// Two hazards with the same key are the same hazard.
std::string Checker::State::key_of(const Hazard& hazard) {
  return std::to_string(static_cast<int>(hazard.kind)) + '\x1f' + std::to_string(hazard.device) + '\x1f' +
      lane_name(hazard.then.lane) + '\x1f' + lane_name(hazard.now.lane) + '\x1d' + text_of(hazard.then.site) +
      text_of(hazard.now.site) + text_of(hazard.kind == HazardKind::ReuseInFlight ? hazard.freed : nullptr);
}

void Checker::State::fold(std::vector<Hazard>& found) {
  // Symbolising a stack may take the interpreter's lock, so the keys are made without ours.
  std::vector<std::string> keys;
  keys.reserve(found.size());
  for (const Hazard& hazard : found) {
    keys.push_back(key_of(hazard));
  }
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < found.size(); ++i) {
    const auto [place, is_new] = folded.emplace(std::move(keys[i]), hazards.size());
    if (is_new) {
      hazards.push_back(found[i]);
    } else {
      found[i].count = ++hazards[place->second].count;
    }
  }
}

}  // namespace sim
