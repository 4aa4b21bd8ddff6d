// The happens-before checker: the clocks of the streams and of the host, the blocks of memory, and the accesses to
// them.
//
// It uses neither torch nor Python, so it compiles quickly and is tested on its own. Every call takes the checker's one
// lock briefly. No call runs foreign code under the lock, and destroying a Site counts as that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "extents.h"

namespace sim {

enum class Mode : uint8_t { Off, Record, Raise, Poison };

/// A sequence of operations that run in order: a stream, or the host. Lane 0 is the host.
using Lane = int32_t;
constexpr Lane kHost = 0;

/// A thread of the host, whose waits order only what it does itself. Threads that nothing is known of count as thread
/// 0.
using HostThread = int32_t;
constexpr HostThread kMainThread = 0;

/// For each lane, the number of the last operation that is known to have finished; missing entries are 0.
using Clock = std::vector<uint64_t>;
inline uint64_t time_of(const Clock& clock, Lane lane) {
  const auto index = static_cast<size_t>(lane);
  return index < clock.size() ? clock[index] : 0;
}

using BlockId = uint64_t;

enum class Kind : uint8_t { Read, Write };

/// One frame of a stack. Lists of frames start with the innermost.
struct Frame {
  std::string file;
  int64_t line = 0;
  std::string function;
};

/// The stack of an operation: captured when the operation is issued, converted to text only on request.
struct Stack {
  virtual ~Stack() = default;
  /// Innermost first. May take the interpreter's lock, so it is never called under the checker's.
  virtual std::vector<Frame> frames() const = 0;
};

/// The origin of an access. Built before the checker is called; never read or destroyed under its lock.
struct Site {
  std::string op;                      // "aten::add_.Tensor", "all_gather_into_tensor", "free"
  std::string label;                   // module, unit or phase, if one was named
  std::string tensor;                  // name of the tensor, if known
  std::shared_ptr<const Stack> stack;  // null if none was captured
};
using SitePtr = std::shared_ptr<const Site>;

struct Access {
  Kind kind = Kind::Read;
  Lane lane = kHost;
  uint64_t tick = 0;
  Extent extent;
  SitePtr site;
  uint64_t allocation = 0;  // counts the block's allocations: a different number is an earlier tenant of the memory
};

enum class HazardKind : uint8_t {
  ReadAfterWrite,
  WriteAfterRead,
  WriteAfterWrite,
  ReuseInFlight,      // the earlier access was to memory that has been freed since: missing record_stream, or freed too
                      // early
  HostWriteInFlight,  // the host wrote into pinned memory that a copy was still using
  HostReadInFlight,   // the host read pinned memory before the copy into it had finished
  UninitializedRead,  // a value that nothing has written, or that was computed from one, is used
};

/// Where a value that nothing has written comes from.
struct Origin {
  SitePtr allocated;
  Lane lane = kHost;
  BlockId block = 0;  // counted from 1 within its device
  uint64_t bytes = 0;
  uint64_t allocation = 0;
};
using OriginPtr = std::shared_ptr<const Origin>;

/// Bytes that nothing has written, from `begin` to before `end`.
struct Unwritten {
  int64_t begin = 0;
  int64_t end = 0;
  OriginPtr origin;
};

/// What a wait is for, to explain one that does not help: an event as it was recorded, the end of a collective, a
/// stream or a device.
struct Mark {
  Lane lane = kHost;    // that it was recorded on, or that is waited for
  uint64_t order = 0;   // when, in the order of the program
  SitePtr site;         // what recorded it, or the collective; null for a stream or a device
  int32_t device = -1;  // for a device
};

/// The reason why a wait does not order two racing accesses.
enum class Useless : uint8_t {
  RecordedTooEarly,  // it is for an event of the right stream that was recorded before the first access
  OtherStream,       // it is for another stream
  OtherDevice,       // it is for another device
  OtherEvent,        // it is for an event of another stream that was recorded before the first access
  WaitsTooEarly,     // it is for the right stream, but comes before the first access
  OtherWaiter,       // it is for the first access, but by another stream than that of the second
};

/// A wait that does not order two racing accesses.
struct UselessWait {
  Useless why;
  Mark mark;
  Lane waiter = kHost;
  SitePtr waited;  // what waits
};

struct Hazard {
  HazardKind kind = HazardKind::ReadAfterWrite;
  Access then;         // the earlier access, in program order
  Access now;          // the one that does not wait for it
  BlockId block = 0;   // touched by `now`; counted from 1 within its device, so that two runs agree
  uint64_t bytes = 0;  // of the block
  int32_t device = 0;
  bool pinned = false;
  SitePtr allocated;         // where the memory that `now` touches was allocated
  SitePtr freed;             // for ReuseInFlight: where the earlier tenant was freed
  Lane tenant_lane = kHost;  // the lane that the memory of `then` was allocated on
  BlockId then_block = 0;    // differs from `block` only under Reuse::WorstCase
  uint64_t then_bytes = 0;
  std::vector<UselessWait> useless_waits;  // the last one for each reason
  SitePtr hidden_by;   // Waits::Explicit: the wait of the host that orders the two in this run, for another reason
  uint64_t count = 0;  // equal hazards are folded: same kind, device, ops, labels, lanes and stacks
};

/// Which unfinished accesses a new allocation is compared with.
enum class Reuse : uint8_t {
  Exact,      // those to the block that it was given
  WorstCase,  // also those to every free block that a caching allocator could have chosen instead
};

/// Which waits of the host order the streams. The host waits explicitly in `synchronize`, in a barrier, or by asking
/// whether an event has happened; and implicitly to give the program a value or a size: `item`, `nonzero`, a copy that
/// blocks. A program that takes its last `item` away keeps only the explicit ones.
enum class Waits : uint8_t { All, Explicit };

class Checker {
 public:
  /// The checker of this process. Tests make their own.
  static Checker& get();
  Checker();
  ~Checker();
  Checker(const Checker&) = delete;
  Checker& operator=(const Checker&) = delete;

  Mode mode() const;
  void set_mode(Mode mode);
  Reuse reuse() const;
  /// Blocks that are free when the mode changes to WorstCase take part from their next free on.
  void set_reuse(Reuse reuse);
  Waits waits() const;
  /// Set it before the first access: what the host has waited for until then counts as waited for.
  void set_waits(Waits waits);

  // Lanes and their clocks.
  Lane add_lane(std::string name, int32_t device);
  std::string lane_name(Lane lane) const;
  void rename_lane(Lane lane, std::string name);
  /// Where the program made the stream, the last times: streams come from a pool. Empty if that is unknown.
  std::vector<SitePtr> lane_made(Lane lane) const;
  void set_lane_made(Lane lane, std::vector<SitePtr> sites);
  int32_t lane_device(Lane lane) const;
  /// Counted from 0 within the device, in the order of creation; the host is 0 of device -1.
  int32_t lane_number(Lane lane) const;
  size_t num_lanes() const;
  /// The host submits an operation to a lane: the lane learns what the host knows, and counts one more operation.
  void submit(Lane lane);
  /// What the lane knows; for the host, what this thread knows.
  Clock snapshot(Lane lane) const;
  /// The clock of an event that this thread records on the lane now.
  Clock record(Lane lane) const;
  // Each returns whether the waiting side learned anything; a wait that teaches nothing is redundant.
  bool wait(Lane lane, const Clock& clock);
  bool host_wait(const Clock& clock);
  /// `implicit`: what waits, if the program did not ask for the wait (Waits).
  bool host_wait_lane(Lane lane, SitePtr implicit = nullptr);
  bool host_wait_device(int32_t device);
  /// An event is recorded on the lane now by `site`, or a wait for the lane or for a whole device begins.
  Mark mark(Lane lane, SitePtr site, int32_t device = -1);
  /// `waited` has made the lane wait for a mark, which has this clock.
  void note_wait(Lane lane, const Clock& clock, Mark mark, SitePtr waited);
  /// Whether the host knows that everything in the clock has finished.
  bool host_knows(const Clock& clock) const;

  // Threads of the host. Each has its own clock, and "the host" is the thread that calls.
  /// This thread has a clock of its own from now on, and knows nothing yet. Call `end_host_thread` in it.
  void begin_host_thread();
  void end_host_thread();
  /// After a fork, this thread is the only one.
  void only_this_host_thread();
  /// What this thread knows, and what it has waited for explicitly: for another thread to learn.
  std::pair<Clock, Clock> known_here() const;
  void learn(const std::pair<Clock, Clock>& known);
  static HostThread host_thread();
  /// This thread works for another one (autograd's do), unless it has a clock of its own.
  static void work_for(HostThread thread);

  // Memory. A block keeps its history when it is freed and allocated again, so that the unfinished accesses of former
  // tenants are seen. Blocks, allocations and frees are tracked during a suspension and in Mode::Off too.
  BlockId add_block(uint64_t bytes, int32_t device, bool pinned);
  /// For memory whose size is known only when it is used: between `allocated` and the first access.
  void resize_block(BlockId block, uint64_t bytes);
  /// The memory returns to the system, which waits for all uses of it.
  void remove_block(BlockId block);
  /// A new tenant. `lane` is the stream that it was allocated on, kHost for pinned memory. This is not an access.
  /// `written`: the memory already holds a result.
  void allocated(BlockId block, Lane lane, SitePtr site, bool written = true);
  void freed(BlockId block, SitePtr site);
  /// `Tensor.record_stream`: when the block is freed, it is not reused until the work submitted to the lane has
  /// finished.
  void record_stream(BlockId block, Lane lane);

  /// Note an access by the lane's current operation (call submit() first, except for the host). If the access races,
  /// returns the hazard: the caller raises (Mode::Raise) or overwrites the result (Mode::Poison) after this call,
  /// without the lock.
  ///
  /// From then on the missing wait counts as made, so that it is reported where it belongs and not again with every
  /// later operation. Of the accesses of one other lane only the last is reported: a wait for it covers the others.
  ///
  /// `finished`: the call returns to the program when this access is done, so that nothing later can race with it.
  std::optional<Hazard> access(
      BlockId block, Kind kind, const Extent& extent, Lane lane, const SitePtr& site, bool finished = false);
  /// The same for a caller that must not wait for the interpreter's lock: a hazard is entered later, by `hazards`.
  std::optional<Hazard> access_without_waiting(
      BlockId block, Kind kind, const Extent& extent, Lane lane, const SitePtr& site);

  // Memory that nothing has written. It may be copied and computed with: what is computed from it counts as unwritten
  // too (uninitialized.h decides which bytes). Only using it is a hazard. Off by default.
  bool tracks_unwritten() const;
  /// From the next allocation on.
  void track_unwritten(bool on);
  /// Whether any live memory is unwritten. If not, nothing has to be asked.
  bool any_unwritten() const;
  /// The unwritten bytes among those of an extent, in order, relative to the block.
  std::vector<Unwritten> unwritten(BlockId block, const Extent& extent) const;
  /// The bytes hold values now.
  void written(BlockId block, const Extent& extent);
  /// The bytes hold values that nothing has written, copied or computed from others.
  void spoil(BlockId block, std::vector<Unwritten> bytes);
  /// The current operation of a lane uses values that nothing has written. They count as written from then on.
  std::optional<Hazard> use_unwritten(
      BlockId block, const Extent& extent, Lane lane, const SitePtr& site, const Unwritten& first);

  /// While this thread is suspended, nothing it does is checked, noted or counted as a synchronisation. An event that
  /// it records during a suspension holds the clock from before. Suspensions nest.
  static void suspend();
  static void resume();
  static bool suspended();

  /// By device, then in the order in which they were first found.
  std::vector<Hazard> hazards() const;
  size_t num_hazards() const;
  /// For one device, or for all.
  void clear_hazards(std::optional<int32_t> device = std::nullopt);
  /// Forget all accesses, on one device or on all; clocks and blocks stay. For the boundary between two runs.
  void clear_history(std::optional<int32_t> device = std::nullopt);
  /// Accesses checked since the process started: a run without any has tested nothing.
  uint64_t accesses() const;
  /// From now on compute, for each device, a checksum of what each access knew about the device's other streams.
  ///
  /// It depends on the program alone: streams are numbered by their first access, operations are counted from now on.
  /// If a program has the same checksum with and without a wait, no access knew less without it: the wait is redundant.
  void begin_order_digest();
  uint64_t order_digest(int32_t device) const;
  /// The number of accesses in the history of one block, or of all blocks. For tests.
  size_t history_size(BlockId block) const;
  size_t history_size() const;

 private:
  std::vector<Hazard> compare(
      BlockId block, Kind kind, const Extent& extent, Lane lane, const SitePtr& site, bool finished);
  void fold_deferred() const;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sim
