#include "checker.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <unordered_map>

namespace sim {
namespace {

thread_local int suspensions = 0;

// ---------------------------------------------------------------------------------------------------------------------
// Extents
// ---------------------------------------------------------------------------------------------------------------------

int64_t floor_div(int64_t a, int64_t b) {
  return a / b - static_cast<int64_t>(a % b != 0 && (a < 0) != (b < 0));
}

int64_t ceil_div(int64_t a, int64_t b) {
  return -floor_div(-a, b);
}

int64_t floor_mod(int64_t a, int64_t b) {
  return a - floor_div(a, b) * b;
}

/// Whether a multiple of `step`, factor within [first, last], lies in [low, high].
bool has_multiple(int64_t step, int64_t first, int64_t last, int64_t low, int64_t high) {
  return std::max(first, ceil_div(low, step)) <= std::min(last, floor_div(high, step));
}

/// The smallest x >= 0 with low <= a*x mod m <= high, or -1. 0 <= a < m, 0 <= low <= high < m. As Euclid's algorithm.
int64_t first_in_range(int64_t a, int64_t m, int64_t low, int64_t high) {
  if (low == 0) {
    return 0;
  }
  if (a == 0) {
    return -1;
  }
  const int64_t x = ceil_div(low, a);
  if (x <= floor_div(high, a)) {
    return x;
  }
  // No multiple of a in [low, high]: the first turn y around m after which one is in [m*y + low, m*y + high].
  const int64_t y = first_in_range(m % a, a, a - high % a, a - low % a);
  if (y < 0) {
    return -1;
  }
  const auto target = static_cast<__int128>(m) * y + low;
  return static_cast<int64_t>((target + a - 1) / a);
}

/// One summand x * stride of the distance between two runs, x within [first, last].
struct Term {
  int64_t stride;
  int64_t first;
  int64_t last;
};

/// Whether a sum of terms can fall into a window: how far two strided extents can be from each other.
class Distances {
 public:
  explicit Distances(std::vector<Term> terms) : terms_(std::move(terms)), below_(terms_.size() + 1) {
    for (size_t k = terms_.size(); k-- > 0;) {
      const Term& term = terms_[k];
      const Rest& rest = below_[k + 1];
      Rest& here = below_[k];
      here.least = rest.least + term.stride * term.first;
      here.most = rest.most + term.stride * term.last;
      here.divisor = std::gcd(rest.divisor, term.stride);
      // With a step no wider than what the rest spans, no multiple of the divisor is left out.
      here.gapless = rest.gapless && (rest.divisor == 0 || rest.divisor == here.divisor) &&
          term.stride <= rest.most - rest.least + here.divisor;
    }
  }

  bool reach(int64_t low, int64_t high) const {
    return reach(0, low, high);
  }

 private:
  /// What the terms from one on can add up to.
  struct Rest {
    int64_t least = 0;
    int64_t most = 0;
    int64_t divisor = 0;
    bool gapless = true;
  };

  bool reach(size_t k, int64_t low, int64_t high) const {
    const Rest& here = below_[k];
    low = std::max(low, here.least);
    high = std::min(high, here.most);
    if (low > high) {
      return false;
    }
    if (k == terms_.size()) {
      return true;  // least == most == 0
    }
    if (floor_div(high, here.divisor) * here.divisor < low) {
      return false;
    }
    if (here.gapless) {
      return true;
    }
    const Term& term = terms_[k];
    const Rest& rest = below_[k + 1];
    const int64_t first = std::max(term.first, ceil_div(low - rest.most, term.stride));
    const int64_t last = std::min(term.last, floor_div(high - rest.least, term.stride));
    if (last - first >= 8 && k + 2 == terms_.size()) {
      return reach_with_two(term, terms_[k + 1], first, last, low, high);
    }
    for (int64_t x = first; x <= last; ++x) {
      if (reach(k + 1, low - x * term.stride, high - x * term.stride)) {
        return true;
      }
    }
    return false;
  }

  /// Whether x*s + y*t falls into [low, high], x within [first, last]: without trying each x.
  static bool reach_with_two(
      const Term& s_term, const Term& t_term, int64_t first, int64_t last, int64_t low, int64_t high) {
    const int64_t s = s_term.stride;
    const int64_t t = t_term.stride;
    if (high - low + 1 >= t) {
      return first <= last;  // The caller's bounds on x leave a y for each.
    }
    // The smallest and the largest y, then those x for which y has no bound.
    for (const int64_t y : {t_term.first, t_term.last}) {
      if (has_multiple(s, first, last, low - t * y, high - t * y)) {
        return true;
      }
    }
    first = std::max(first, ceil_div(high - t * t_term.last, s));
    last = std::min(last, floor_div(low - t * t_term.first, s));
    if (first > last) {
      return false;
    }
    // A multiple of t lies in [low - s*x, high - s*x] where (high - s*x) mod t <= high - low.
    const int64_t window = high - low;
    const int64_t a = floor_mod(-s, t);
    const int64_t base = floor_mod(high - s * first, t);
    const int64_t from = floor_mod(-base, t);
    const int64_t to = from + window;
    if (to >= t || from == 0) {
      return true;  // x = first
    }
    const int64_t x = first_in_range(a, t, from, to);
    return x >= 0 && x <= last - first;
  }

  std::vector<Term> terms_;  // the largest stride first
  std::vector<Rest> below_;
};

int64_t end_of(const Extent& extent) {
  int64_t end = extent.offset + extent.run;
  for (const auto& [count, stride] : extent.repeats) {
    end += (count - 1) * stride;
  }
  return end;
}

bool overlap_of_normalized(const Extent& a, const Extent& b) {
  if (a.run <= 0 || b.run <= 0 || a.offset >= end_of(b) || b.offset >= end_of(a)) {
    return false;
  }
  if (a.repeats.empty() && b.repeats.empty()) {
    return true;
  }
  // A run of `a` starts at a.offset + sum(i*s), one of `b` at b.offset + sum(j*t); they share a byte if the first start
  // is less than b.run after and less than a.run before the second. Equal strides make one term: i - j.
  std::vector<Term> terms;
  auto left = a.repeats.begin();
  auto right = b.repeats.begin();
  while (left != a.repeats.end() || right != b.repeats.end()) {
    const int64_t left_stride = left == a.repeats.end() ? 0 : left->second;
    const int64_t stride = std::max(left_stride, right == b.repeats.end() ? 0 : right->second);
    Term term{stride, 0, 0};
    if (left != a.repeats.end() && left->second == stride) {
      term.last = left->first - 1;
      ++left;
    }
    if (right != b.repeats.end() && right->second == stride) {
      term.first = -(right->first - 1);
      ++right;
    }
    terms.push_back(term);
  }
  const int64_t apart = b.offset - a.offset;
  return Distances(std::move(terms)).reach(apart - a.run + 1, apart + b.run - 1);
}

/// Whether `a` has every byte of `b`. May say no for strided ones that do: then an access is kept for longer.
bool covers(const Extent& a, const Extent& b) {
  if (a.repeats.empty()) {
    return a.offset <= b.offset && end_of(b) <= a.offset + a.run;
  }
  return a.offset <= b.offset && b.offset + b.run <= a.offset + a.run && a.repeats == b.repeats;
}

// ---------------------------------------------------------------------------------------------------------------------
// Clocks and histories
// ---------------------------------------------------------------------------------------------------------------------

uint64_t time_of(const Clock& clock, Lane lane) {
  const auto index = static_cast<size_t>(lane);
  return index < clock.size() ? clock[index] : 0;
}

/// Returns whether `into` has learnt something.
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

/// One allocation of a block, from its allocation to its free.
struct Tenant {
  uint64_t allocation = 0;
  Lane lane = kHost;
  uint64_t block_number = 0;
  uint64_t bytes = 0;
  SitePtr allocated;
  SitePtr freed;
  /// Accesses of a lane up to a tick that no later tenant has to wait for: reported already.
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

/// An access that is held in a history.
struct Entry {
  int64_t begin;
  int64_t end;
  uint64_t tick;
  Lane lane;
  Kind kind;
  Extent extent;  // normalized
  SitePtr site;
  std::shared_ptr<Tenant> tenant;

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
  /// got.
  std::vector<Entry> inherited;
  /// ... and, while the block is free, to this memory.
  std::vector<Entry> unfinished;
};

struct LaneState {
  std::string name;
  int32_t device = 0;
  int32_t number = 0;
  Clock clock;
  // Since the order digest was begun:
  uint64_t ticks_before = 0;
  uint64_t digest_number = 0;  // by first access, from 1 on; 0: none yet
};

/// What the accesses of a device knew, summed up.
struct Digest {
  uint64_t sum = 0;
  uint64_t lanes = 0;

  void add(uint64_t value) {
    // The finalizer of splitmix64 (Steele, Lea, Flood 2014) over what there is and what comes.
    sum += value + 0x9e3779b97f4a7c15;
    sum = (sum ^ (sum >> 30)) * 0xbf58476d1ce4e5b9;
    sum = (sum ^ (sum >> 27)) * 0x94d049bb133111eb;
    sum ^= sum >> 31;
  }
};

// As CUDA's caching allocator: sizes are multiples of 512 bytes; up to 1 MiB comes out of a pool of its own
// (c10/cuda/CUDACachingAllocator: kMinBlockSize, kSmallSize).
constexpr uint64_t kMinBlockBytes = 512;
constexpr uint64_t kSmallBytes = 1 << 20;

uint64_t rounded(uint64_t bytes) {
  return std::max(kMinBlockBytes, (bytes + kMinBlockBytes - 1) / kMinBlockBytes * kMinBlockBytes);
}

using PoolKey = std::pair<Lane, bool>;  // allocation lane, small

/// Free blocks of one size with unfinished accesses, for Reuse::WorstCase.
struct SizeClass {
  std::set<BlockId> blocks;
  std::vector<const Entry*> last;  // of each lane and kind, over all of them; points into their `unfinished`
  bool stale = false;
};

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

Extent normalized(const Extent& extent) {
  const bool is_empty = extent.run <= 0 ||
      std::any_of(extent.repeats.begin(), extent.repeats.end(), [](const auto& repeat) { return repeat.first <= 0; });
  if (is_empty) {
    return {extent.offset, 0, {}};
  }
  Extent result{extent.offset, extent.run, {}};
  if (extent.repeats.empty()) {
    return result;
  }
  auto repeats = extent.repeats;
  std::sort(repeats.begin(), repeats.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  // From the smallest stride on; `result.repeats` has the largest last until the end.
  for (const auto& [count, stride] : repeats) {
    if (count == 1 || stride == 0) {
      continue;
    }
    if (result.repeats.empty() && stride <= result.run) {
      result.run += (count - 1) * stride;
    } else if (!result.repeats.empty() && stride % result.repeats.back().second == 0 &&
               stride / result.repeats.back().second <= result.repeats.back().first) {
      result.repeats.back().first += (count - 1) * (stride / result.repeats.back().second);
    } else {
      result.repeats.emplace_back(count, stride);
    }
  }
  std::reverse(result.repeats.begin(), result.repeats.end());
  return result;
}

bool overlap(const Extent& a, const Extent& b) {
  return overlap_of_normalized(normalized(a), normalized(b));
}

struct Checker::State {
  mutable std::mutex mutex;
  std::atomic<Mode> mode{Mode::Off};
  std::atomic<Reuse> reuse{Reuse::Exact};
  std::atomic<uint64_t> accesses{0};

  std::vector<LaneState> lanes;
  std::map<int32_t, int32_t> lanes_of_device;
  std::map<int32_t, uint64_t> blocks_of_device;
  bool digests_order = false;
  std::map<int32_t, Digest> digests;
  std::unordered_map<BlockId, Block> blocks;
  BlockId last_block = 0;
  std::map<PoolKey, std::map<uint64_t, SizeClass>> pools;  // by rounded size

  std::vector<Hazard> hazards;
  std::map<std::string, size_t> folded;  // what makes two hazards equal -> index in `hazards`

  /// What is taken out under the lock, destroyed after it: declared before the lock, it outlives it.
  struct Trash {
    std::vector<Entry> entries;
    std::vector<std::shared_ptr<Tenant>> tenants;
    std::vector<SitePtr> sites;
  };

  LaneState& lane(Lane lane) {
    if (lane < 0 || static_cast<size_t>(lane) >= lanes.size()) {
      throw std::out_of_range("lane=" + std::to_string(lane) + ", but should be below " + std::to_string(lanes.size()));
    }
    return lanes[static_cast<size_t>(lane)];
  }

  Block& block(BlockId id) {
    const auto found = blocks.find(id);
    if (found == blocks.end()) {
      throw std::out_of_range("block=" + std::to_string(id) + ", but should be one that add_block() returned");
    }
    return found->second;
  }

  Clock& host() {
    return lanes[kHost].clock;
  }

  bool host_knows(const Entry& entry) {
    return time_of(host(), entry.lane) >= entry.tick;
  }

  std::map<uint64_t, SizeClass>& pool_of(const Block& block) {
    return pools[{block.tenant->lane, rounded(block.bytes) <= kSmallBytes}];
  }

  void put_into_pool(BlockId id, const Block& block) {
    SizeClass& size = pool_of(block)[rounded(block.bytes)];
    size.blocks.insert(id);
    for (const Entry& entry : block.unfinished) {
      add_last(size.last, entry);
    }
  }

  void take_from_pool(BlockId id, const Block& block) {
    auto& pool = pool_of(block);
    const auto size = pool.find(rounded(block.bytes));
    if (size != pool.end() && size->second.blocks.erase(id) > 0) {
      size->second.last.clear();
      size->second.stale = true;
    }
  }

  void refresh(SizeClass& size) {
    size.last.clear();
    size.stale = false;
    for (auto id = size.blocks.begin(); id != size.blocks.end();) {
      const auto& unfinished = blocks.at(*id).unfinished;
      // What the host knows to have ended, nobody will ever have to wait for.
      const bool is_known =
          std::all_of(unfinished.begin(), unfinished.end(), [&](const Entry& entry) { return host_knows(entry); });
      if (is_known) {
        id = size.blocks.erase(id);
        continue;
      }
      for (const Entry& entry : unfinished) {
        add_last(size.last, entry);
      }
      ++id;
    }
  }

  /// Move what `keep` refuses out of a history, in order.
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
    entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(kept), entries.end());  // only moved-from ones
  }

  static void throw_away(std::vector<Entry>& entries, Trash& trash) {
    std::move(entries.begin(), entries.end(), std::back_inserter(trash.entries));
    entries.clear();
  }

  /// The last of each lane and kind: whoever is ordered after it is ordered after the earlier ones.
  void add_last(std::vector<const Entry*>& last, const Entry& entry) {
    if (host_knows(entry) || entry.tenant->excuses(entry.lane, entry.tick)) {
      return;
    }
    for (const Entry*& other : last) {
      if (other->lane == entry.lane && other->kind == entry.kind) {
        if (other->tick < entry.tick) {
          other = &entry;
        }
        return;
      }
    }
    last.push_back(&entry);
  }

  void digest(int32_t device, Lane of, Kind kind) {
    Digest& digest = digests[device];
    LaneState& own = lane(of);
    if (own.digest_number == 0 && of != kHost) {
      own.digest_number = ++digest.lanes;
    }
    digest.add(own.digest_number * 2 + static_cast<uint64_t>(kind));
    std::vector<uint64_t> known(digest.lanes + 1, 0);  // [0]: of streams without an access yet, together
    for (size_t other = 1; other < lanes.size(); ++other) {
      const uint64_t ticks = time_of(own.clock, static_cast<Lane>(other));
      if (lanes[other].device == device && ticks > lanes[other].ticks_before) {
        known[lanes[other].digest_number] += ticks - lanes[other].ticks_before;
      }
    }
    for (const uint64_t ticks : known) {
      digest.add(ticks);
    }
  }

  static std::vector<Entry> copies(const std::vector<const Entry*>& entries) {
    std::vector<Entry> result;
    result.reserve(entries.size());
    for (const Entry* entry : entries) {
      result.push_back(*entry);
    }
    return result;
  }

  /// What the new tenant of `block` meets besides the block's own history.
  void inherit(Block& block, Trash& trash) {
    std::vector<const Entry*> last;
    for (const Entry& entry : block.inherited) {
      add_last(last, entry);
    }
    auto& pool = pool_of(block);
    for (auto it = pool.lower_bound(rounded(block.bytes)); it != pool.end();) {
      SizeClass& size = it->second;
      const bool is_over = std::any_of(size.last.begin(), size.last.end(), [&](const Entry* entry) {
        return host_knows(*entry) || entry->tenant->excuses(entry->lane, entry->tick);
      });
      if (size.stale || is_over) {
        refresh(size);
      }
      for (const Entry* entry : size.last) {
        add_last(last, *entry);
      }
      it = size.blocks.empty() ? pool.erase(it) : std::next(it);
    }
    std::vector<Entry> inherited = copies(last);
    throw_away(block.inherited, trash);
    block.inherited = std::move(inherited);
  }
};

Checker& Checker::get() {
  static Checker* checker = new Checker();  // never destroyed: sites may hold objects of an interpreter that has ended
  return *checker;
}

Checker::Checker() : state_(std::make_unique<State>()) {
  state_->lanes.push_back({"host", -1, 0, {1}, 0, 0});
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

// ---------------------------------------------------------------------------------------------------------------------
// Lanes
// ---------------------------------------------------------------------------------------------------------------------

Lane Checker::add_lane(std::string name, int32_t device) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->lanes.push_back({std::move(name), device, state_->lanes_of_device[device]++, {}, 0, 0});
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
  Clock& clock = state_->lane(lane).clock;
  if (lane != kHost) {
    join(clock, state_->host());
  }
  if (clock.size() <= static_cast<size_t>(lane)) {
    clock.resize(static_cast<size_t>(lane) + 1, 0);
  }
  ++clock[static_cast<size_t>(lane)];
}

Clock Checker::snapshot(Lane lane) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->lane(lane).clock;  // Without what the host knows: whoever waits for it knows that anyway.
}

bool Checker::wait(Lane lane, const Clock& clock) {
  if (suspended()) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Clock& own = state_->lane(lane).clock;
  if (lane != kHost) {
    join(own, state_->host());  // It would learn that with its next operation; a wait for it teaches nothing.
  }
  return join(own, clock);
}

bool Checker::host_wait(const Clock& clock) {
  return wait(kHost, clock);
}

bool Checker::host_wait_lane(Lane lane) {
  if (suspended()) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return lane != kHost && join(state_->host(), state_->lane(lane).clock);
}

bool Checker::host_wait_device(int32_t device) {
  if (suspended()) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  bool learnt = false;
  for (size_t lane = 1; lane < state_->lanes.size(); ++lane) {
    if (state_->lanes[lane].device == device) {
      learnt = join(state_->host(), state_->lanes[lane].clock) || learnt;
    }
  }
  return learnt;
}

bool Checker::host_knows(const Clock& clock) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return includes(state_->host(), clock);
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
  block.tenant = std::make_shared<Tenant>();  // of an access before any allocation
  block.tenant->block_number = block.number;
  block.tenant->bytes = bytes;
  return id;
}

void Checker::remove_block(BlockId id) {
  Block removed;  // destroyed after the lock
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto found = state_->blocks.find(id);
  if (found == state_->blocks.end()) {
    return;
  }
  state_->take_from_pool(id, found->second);
  removed = std::move(found->second);
  state_->blocks.erase(found);
}

void Checker::allocated(BlockId id, Lane lane, SitePtr site) {
  auto tenant = std::make_shared<Tenant>();
  State::Trash trash;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Block& block = state_->block(id);
  state_->take_from_pool(id, block);
  tenant->allocation = ++block.allocations;
  tenant->lane = lane;
  tenant->block_number = block.number;
  tenant->bytes = block.bytes;
  tenant->allocated = std::move(site);
  trash.tenants.push_back(std::move(block.tenant));
  block.tenant = std::move(tenant);
  block.live = true;
  block.recorded.clear();
  State::throw_away(block.unfinished, trash);
  // Who looks on from a suspension writes what it allocates there: nobody's unfinished work can be in that memory.
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
  state_->take_from_pool(id, block);  // freed twice: not by our allocators
  State::throw_away(block.unfinished, trash);
  trash.sites.push_back(std::move(block.tenant->freed));
  block.tenant->freed = std::move(site);
  // An event is recorded on each of these streams now, and nobody gets the memory before they are all done.
  Clock released = state_->host();
  for (const Lane lane : block.recorded) {
    join(released, state_->lane(lane).clock);
  }
  const auto keep = [&](const Entry& entry) { return time_of(released, entry.lane) < entry.tick; };
  State::filter(block.history, trash, keep);
  State::filter(block.inherited, trash, keep);
  if (state_->reuse.load() == Reuse::WorstCase && !block.pinned) {
    std::vector<const Entry*> last;
    for (const Entry& entry : block.history) {
      state_->add_last(last, entry);
    }
    for (const Entry& entry : block.inherited) {
      state_->add_last(last, entry);
    }
    block.unfinished = State::copies(last);
    if (!block.unfinished.empty()) {
      state_->put_into_pool(id, block);
    }
  }
}

void Checker::record_stream(BlockId id, Lane lane) {
  if (suspended()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Block& block = state_->block(id);
  // The allocator serves its own stream in order, and records nothing there.
  if (lane != block.tenant->lane &&
      std::find(block.recorded.begin(), block.recorded.end(), lane) == block.recorded.end()) {
    block.recorded.push_back(lane);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Accesses
// ---------------------------------------------------------------------------------------------------------------------

std::optional<Hazard> Checker::access(
    BlockId id, Kind kind, const Extent& extent, Lane lane, const SitePtr& site) {
  if (suspended() || state_->mode.load() == Mode::Off) {
    return std::nullopt;
  }
  Entry now{0, 0, 0, lane, kind, normalized(extent), site, nullptr};
  if (now.extent.run <= 0) {
    return std::nullopt;
  }
  now.begin = now.extent.offset;
  now.end = end_of(now.extent);
  state_->accesses.fetch_add(1, std::memory_order_relaxed);

  std::vector<Hazard> found;
  {
    State::Trash trash;
    const std::lock_guard<std::mutex> lock(state_->mutex);
    Block& block = state_->block(id);
    Clock& clock = state_->lane(lane).clock;
    now.tick = time_of(clock, lane);
    now.tenant = block.tenant;
    if (now.tick == 0) {
      throw std::logic_error("access on lane " + std::to_string(lane) + " before any submit()");
    }
    if (state_->digests_order) {
      state_->digest(block.device, lane, kind);
    }
    const auto is_ordered = [&](const Entry& then) {
      return time_of(clock, then.lane) >= then.tick ||
          (then.tenant != now.tenant && then.tenant->excuses(then.lane, then.tick));
    };
    const auto conflicts = [&](const Entry& then) { return then.kind == Kind::Write || kind == Kind::Write; };

    // Which of the unordered accesses to tell: the last one of each lane.
    std::vector<const Entry*> racing;
    const auto add_racing = [&](const Entry& then) {
      for (const Entry*& other : racing) {
        if (other->lane == then.lane) {
          other = other->tick < then.tick ? &then : other;
          return;
        }
      }
      racing.push_back(&then);
    };
    for (const Entry& then : block.history) {
      if (conflicts(then) && then.begin < now.end && now.begin < then.end && !is_ordered(then) &&
          overlap_of_normalized(then.extent, now.extent)) {
        add_racing(then);
      }
    }
    // Where the two tenants lie in the memory that they could have shared is open, so any bytes of theirs conflict.
    for (const Entry& then : block.inherited) {
      if (conflicts(then) && !is_ordered(then)) {
        add_racing(then);
      }
    }
    std::sort(racing.begin(), racing.end(), [](const Entry* a, const Entry* b) { return a->lane < b->lane; });

    for (const Entry* then : racing) {
      Hazard hazard;
      const bool reuse = then->tenant != now.tenant;
      hazard.kind = reuse ? HazardKind::ReuseInFlight
          : lane == kHost ? (kind == Kind::Write ? HazardKind::HostWriteInFlight : HazardKind::HostReadInFlight)
          : kind == Kind::Read         ? HazardKind::ReadAfterWrite
          : then->kind == Kind::Read   ? HazardKind::WriteAfterRead
                                       : HazardKind::WriteAfterWrite;
      hazard.then = then->access();
      hazard.now = now.access();
      hazard.block = block.number;
      hazard.bytes = block.bytes;
      hazard.device = block.device;
      hazard.pinned = block.pinned;
      hazard.allocated = now.tenant->allocated;
      hazard.freed = then->tenant->freed;
      hazard.tenant_lane = then->tenant->lane;
      hazard.then_block = then->tenant->block_number;
      hazard.then_bytes = then->tenant->bytes;
      hazard.count = 1;
      found.push_back(std::move(hazard));
      if (reuse) {
        // record_stream would have ordered these accesses and nothing else.
        then->tenant->excuse(then->lane, then->tick);
      } else if (lane != kHost) {
        if (clock.size() <= static_cast<size_t>(then->lane)) {
          clock.resize(static_cast<size_t>(then->lane) + 1, 0);
        }
        uint64_t& known = clock[static_cast<size_t>(then->lane)];
        known = std::max(known, then->tick);
      }
    }

    // Drop what nobody will have to be compared with again.
    State::filter(block.history, trash, [&](const Entry& then) {
      if (state_->host_knows(then)) {
        return false;
      }
      if (lane == kHost || now.begin > then.begin || then.end > now.end || !covers(now.extent, then.extent)) {
        return true;
      }
      const bool same_kind = then.lane == lane && then.kind == kind;
      return !same_kind && !(kind == Kind::Write && is_ordered(then));
    });
    const bool whole = now.begin <= 0 && static_cast<uint64_t>(now.end) >= block.bytes && now.extent.repeats.empty();
    State::filter(block.inherited, trash, [&](const Entry& then) {
      return !state_->host_knows(then) && !(lane != kHost && kind == Kind::Write && whole && is_ordered(then));
    });
    // What the host does itself is over before it submits anything else: nobody can race with it later.
    if (lane != kHost) {
      block.history.push_back(std::move(now));
    }
  }
  if (found.empty()) {
    return std::nullopt;
  }

  // Symbolising a stack may take the interpreter's lock: never under ours.
  std::vector<std::string> keys;
  keys.reserve(found.size());
  for (const Hazard& hazard : found) {
    keys.push_back(
        std::to_string(static_cast<int>(hazard.kind)) + '\x1f' + std::to_string(hazard.device) + '\x1f' +
        lane_name(hazard.then.lane) + '\x1f' + lane_name(hazard.now.lane) + '\x1d' + text_of(hazard.then.site) +
        text_of(hazard.now.site) + text_of(hazard.kind == HazardKind::ReuseInFlight ? hazard.freed : nullptr));
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  for (size_t i = 0; i < found.size(); ++i) {
    const auto [place, is_new] = state_->folded.emplace(std::move(keys[i]), state_->hazards.size());
    if (is_new) {
      state_->hazards.push_back(found[i]);
    } else {
      found[i].count = ++state_->hazards[place->second].count;
    }
  }
  return found.front();
}

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
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::vector<Hazard> result = state_->hazards;
  std::stable_sort(result.begin(), result.end(), [](const Hazard& a, const Hazard& b) { return a.device < b.device; });
  return result;
}

size_t Checker::num_hazards() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->hazards.size();
}

void Checker::clear_hazards(std::optional<int32_t> device) {
  std::vector<Hazard> cleared;  // destroyed after the lock
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
    state.ticks_before = time_of(state.clock, static_cast<Lane>(lane));
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
