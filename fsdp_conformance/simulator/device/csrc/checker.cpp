#include "checker.h"

#include <iterator>

#include "checker_state.h"

namespace sim {
namespace {

thread_local int suspensions = 0;

thread_local HostThread works_for = kMainThread;
thread_local bool has_own_clock = false;

/// How many waits of a lane are remembered, to explain hazards.
constexpr size_t kKeptWaits = 32;

/// Returns whether `into` learned anything.
bool join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) {
    into.resize(from.size(), 0);
  }
  bool learnt = false;
  for (size_t lane = 0; lane < from.size(); ++lane) {
    if (into[lane] < from[lane]) {
      into[lane] = from[lane];
      learnt = true;
    }
  }
  return learnt;
}

bool includes(const Clock& clock, const Clock& part) {
  for (size_t lane = 0; lane < part.size(); ++lane) {
    if (part[lane] > time_of(clock, static_cast<Lane>(lane))) {
      return false;
    }
  }
  return true;
}

}  // namespace

Checker& Checker::get() {
  static Checker* checker = new Checker();  // never destroyed: sites may hold objects of an interpreter that is gone
  return *checker;
}

Checker::Checker() : state_(std::make_unique<State>()) {
  state_->hosts.emplace(kMainThread, HostState{});
  state_->lanes.push_back({"host", -1, 0, {}, {}, 0, 0, {}});
  state_->lanes_of_device[-1] = 1;
}

Checker::~Checker() = default;

Mode Checker::mode() const {
  return state_->mode;
}

void Checker::set_mode(Mode mode) {
  state_->mode = mode;
}

Reuse Checker::reuse() const {
  return state_->reuse;
}

void Checker::set_reuse(Reuse reuse) {
  state_->reuse = reuse;
}

Waits Checker::waits() const {
  return state_->waits;
}

void Checker::set_waits(Waits waits) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->waits = waits;
  for (auto& [thread, known] : state_->hosts) {
    known.waited = known.clock;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Lanes
// ---------------------------------------------------------------------------------------------------------------------

Lane Checker::add_lane(std::string name, int32_t device) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->lanes.push_back({std::move(name), device, state_->lanes_of_device[device]++, {}, {}, 0, 0, {}});
  return static_cast<Lane>(state_->lanes.size() - 1);
}

std::string Checker::lane_name(Lane lane) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->lane(lane).name;
}

void Checker::rename_lane(Lane lane, std::string name) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->lane(lane).name = std::move(name);
}

std::vector<SitePtr> Checker::lane_made(Lane lane) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->lane(lane).made;
}

void Checker::set_lane_made(Lane lane, std::vector<SitePtr> sites) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->lane(lane).made.swap(sites);  // the former ones are destroyed after the lock is released
}

int32_t Checker::lane_device(Lane lane) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->lane(lane).device;
}

int32_t Checker::lane_number(Lane lane) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->lane(lane).number;
}

size_t Checker::num_lanes() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->lanes.size();
}

void Checker::submit(Lane lane) {
  if (suspended()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Clock& clock = state_->clock_of(lane);
  if (lane != kHost) {
    join(clock, state_->submitted_with());
  }
  ++entry_of(clock, lane);
}

Clock Checker::snapshot(Lane lane) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->clock_of(lane);
}

Clock Checker::record(Lane lane) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Clock clock = state_->clock_of(lane);
  join(clock, state_->submitted_with());  // another thread of the host may wait for the event
  return clock;
}

bool Checker::wait(Lane lane, const Clock& clock) {
  if (suspended()) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Clock& own = state_->clock_of(lane);
  if (lane != kHost) {
    join(own, state_->submitted_with());  // It would learn that anyway, so it does not count as learned here.
  } else {
    join(state_->this_host().waited, clock);
  }
  return join(own, clock);
}

bool Checker::host_wait(const Clock& clock) {
  return wait(kHost, clock);
}

bool Checker::host_wait_lane(Lane lane, SitePtr implicit) {
  if (suspended() || lane == kHost) {
    return false;
  }
  State::Trash trash;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const Clock& clock = state_->lane(lane).clock;
  if (implicit == nullptr) {
    join(state_->this_host().waited, clock);
  } else if (state_->waits.load() == Waits::Explicit) {
    state_->implicit_waits.push_back({clock, std::move(implicit), ++state_->order});
    if (state_->implicit_waits.size() > kKeptWaits) {
      trash.implicit_waits.push_back(std::move(state_->implicit_waits.front()));
      state_->implicit_waits.pop_front();
    }
  }
  return join(state_->host(), clock);
}

bool Checker::host_wait_device(int32_t device) {
  if (suspended()) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  bool learnt = false;
  for (size_t lane = 1; lane < state_->lanes.size(); ++lane) {
    if (state_->lanes[lane].device == device) {
      join(state_->this_host().waited, state_->lanes[lane].clock);
      learnt = join(state_->host(), state_->lanes[lane].clock) || learnt;
    }
  }
  return learnt;
}

bool Checker::host_knows(const Clock& clock) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return includes(state_->host(), clock);
}

void Checker::begin_host_thread() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  works_for = ++state_->last_host;
  has_own_clock = true;
  state_->hosts.emplace(works_for, HostState{});
}

void Checker::end_host_thread() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (has_own_clock) {
    state_->hosts.erase(works_for);
  }
  works_for = kMainThread;
  has_own_clock = false;
}

void Checker::only_this_host_thread() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  HostState known = state_->this_host();
  state_->hosts.clear();
  state_->hosts.emplace(kMainThread, std::move(known));
  works_for = kMainThread;
  has_own_clock = false;
}

std::pair<Clock, Clock> Checker::known_here() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const HostState& known = state_->this_host();
  return {known.clock, known.waited};
}

void Checker::learn(const std::pair<Clock, Clock>& known) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  HostState& own = state_->this_host();
  join(own.clock, known.first);
  join(own.waited, known.second);
}

HostThread Checker::host_thread() {
  return works_for;
}

void Checker::work_for(HostThread thread) {
  if (!has_own_clock) {
    works_for = thread;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Events
// ---------------------------------------------------------------------------------------------------------------------

Mark Checker::mark(Lane lane, SitePtr site, int32_t device) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return {lane, ++state_->order, std::move(site), device};
}

void Checker::note_wait(Lane lane, const Clock& clock, Mark mark, SitePtr waited) {
  if (suspended()) {
    return;
  }
  State::Trash trash;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  auto& waits = state_->lane(lane).waits;
  waits.push_back({std::move(mark), clock, ++state_->order, std::move(waited)});
  if (waits.size() > kKeptWaits) {
    trash.waits.push_back(std::move(waits.front()));
    waits.pop_front();
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory
// ---------------------------------------------------------------------------------------------------------------------

BlockId Checker::add_block(uint64_t bytes, int32_t device, bool pinned) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const BlockId id = ++state_->last_block;
  Block& block = state_->blocks[id];
  block.number = ++state_->blocks_of_device[pinned ? -1 : device];
  block.bytes = bytes;
  block.device = device;
  block.pinned = pinned;
  block.tenant = std::make_shared<Tenant>();  // for an access before any allocation
  block.tenant->block_number = block.number;
  block.tenant->bytes = bytes;
  return id;
}

void Checker::resize_block(BlockId id, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Block& block = state_->block(id);
  block.bytes = bytes;
  block.tenant->bytes = bytes;
}

void Checker::remove_block(BlockId id) {
  Block removed;  // destroyed after the lock
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto found = state_->blocks.find(id);
  if (found == state_->blocks.end()) {
    return;
  }
  state_->take_from_pool(id, found->second);
  if (!found->second.unwritten.empty()) {
    --state_->num_unwritten;
  }
  removed = std::move(found->second);
  state_->blocks.erase(found);
}

void Checker::allocated(BlockId id, Lane lane, SitePtr site, bool written) {
  auto tenant = std::make_shared<Tenant>();
  auto origin = std::make_shared<Origin>();
  State::Trash trash;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Block& block = state_->block(id);
  state_->take_from_pool(id, block);
  tenant->allocation = ++block.allocations;
  tenant->lane = lane;
  tenant->block_number = block.number;
  tenant->bytes = block.bytes;
  tenant->allocated = std::move(site);
  std::vector<Unwritten> bytes;
  if (!written && state_->tracks_unwritten && !suspended() && state_->mode.load() != Mode::Off) {
    *origin = {tenant->allocated, lane, block.number, block.bytes, tenant->allocation};
    bytes.push_back({0, static_cast<int64_t>(block.bytes), std::move(origin)});
  }
  state_->set_unwritten(block, std::move(bytes), trash);
  trash.tenants.push_back(std::move(block.tenant));
  block.tenant = std::move(tenant);
  block.live = true;
  block.recorded.clear();
  State::throw_away(block.unfinished, trash);
  // What a suspended thread allocates, it writes outside the program's order: nothing unfinished can be in that memory.
  if (state_->reuse.load() == Reuse::WorstCase && !block.pinned && !suspended()) {
    state_->inherit(block, trash);
  } else {
    State::throw_away(block.inherited, trash);
  }
}

void Checker::freed(BlockId id, SitePtr site) {
  State::Trash trash;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Block& block = state_->block(id);
  block.live = false;
  state_->take_from_pool(id, block);  // only if freed twice, which our allocators never do
  State::throw_away(block.unfinished, trash);
  state_->set_unwritten(block, {}, trash);
  trash.sites.push_back(std::move(block.tenant->freed));
  block.tenant->freed = std::move(site);
  // An event is recorded on each of these streams now, and the memory is not reused until all of them are complete.
  Clock released = block.pinned ? state_->host() : state_->submitted_with();
  for (const Lane lane : block.recorded) {
    join(released, state_->lane(lane).clock);
  }
  const auto keep = [&](const Entry& entry) { return time_of(released, entry.lane) < entry.tick; };
  State::filter(block.history, trash, keep);
  State::filter(block.inherited, trash, keep);
  if (state_->reuse.load() == Reuse::WorstCase && !block.pinned) {
    state_->offer(id, block);
  }
}

void Checker::record_stream(BlockId id, Lane lane) {
  if (suspended()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Block& block = state_->block(id);
  // On its own stream the allocator relies on the stream's order and records nothing.
  if (lane != block.tenant->lane &&
      std::find(block.recorded.begin(), block.recorded.end(), lane) == block.recorded.end()) {
    block.recorded.push_back(lane);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Suspension, hazards and history
// ---------------------------------------------------------------------------------------------------------------------

void Checker::suspend() {
  ++suspensions;
}

void Checker::resume() {
  if (suspensions == 0) {
    throw std::logic_error("resume() without suspend() in this thread");
  }
  --suspensions;
}

bool Checker::suspended() {
  return suspensions > 0;
}

std::vector<Hazard> Checker::hazards() const {
  fold_deferred();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::vector<Hazard> result = state_->hazards;
  std::stable_sort(result.begin(), result.end(), [](const Hazard& a, const Hazard& b) { return a.device < b.device; });
  return result;
}

size_t Checker::num_hazards() const {
  fold_deferred();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->hazards.size();
}

void Checker::clear_hazards(std::optional<int32_t> device) {
  std::vector<Hazard> cleared;  // destroyed after the lock
  fold_deferred();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  cleared.swap(state_->hazards);
  std::map<std::string, size_t> folded;
  for (const auto& [key, index] : state_->folded) {
    if (device && cleared[index].device != *device) {
      folded.emplace(key, state_->hazards.size());
      state_->hazards.push_back(cleared[index]);
    }
  }
  state_->folded = std::move(folded);
}

void Checker::clear_history(std::optional<int32_t> device) {
  State::Trash trash;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  for (auto& [id, block] : state_->blocks) {
    if (!device || block.device == *device) {
      State::throw_away(block.history, trash);
      State::throw_away(block.inherited, trash);
      State::throw_away(block.unfinished, trash);
    }
  }
  for (auto pool = state_->pools.begin(); pool != state_->pools.end();) {
    const bool cleared = !device || state_->lane(pool->first.first).device == *device;
    pool = cleared ? state_->pools.erase(pool) : std::next(pool);
  }
}

uint64_t Checker::accesses() const {
  return state_->accesses.load();
}

void Checker::begin_order_digest() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->digests_order = true;
  state_->digests.clear();
  for (size_t lane = 0; lane < state_->lanes.size(); ++lane) {
    LaneState& state = state_->lanes[lane];
    state.ticks_before = time_of(state_->clock_of(static_cast<Lane>(lane)), static_cast<Lane>(lane));
    state.digest_number = 0;
  }
}

uint64_t Checker::order_digest(int32_t device) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto found = state_->digests.find(device);
  return found == state_->digests.end() ? 0 : found->second.sum;
}

size_t Checker::history_size(BlockId id) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const Block& block = state_->block(id);
  return block.history.size() + block.inherited.size();
}

size_t Checker::history_size() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  size_t size = 0;
  for (const auto& [id, block] : state_->blocks) {
    size += block.history.size() + block.inherited.size() + block.unfinished.size();
  }
  return size;
}

}  // namespace sim
