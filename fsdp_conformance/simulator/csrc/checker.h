// The happens-before checker: the clocks of streams and of the host, blocks of memory, and who touched which bytes
// when.
//
// Nothing of torch and nothing of Python in here: it compiles in a moment and is tested on its own. Every call takes
// the checker's one lock for a short time; no call runs foreign code (destroying a Site included) while it holds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sim {

enum class Mode : uint8_t { Off, Record, Raise, Poison };

/// What runs its work in order: a stream, or the host. Lane 0 is the host; all its threads count as one.
using Lane = int32_t;
constexpr Lane kHost = 0;

/// For each lane the number of its last operation that is known to have ended; what is missing is 0.
using Clock = std::vector<uint64_t>;

using BlockId = uint64_t;

enum class Kind : uint8_t { Read, Write };

/// The bytes of a block that an access touches: runs of `run` bytes from `offset`, repeated by (count, stride in
/// bytes).
struct Extent {
  int64_t offset = 0;
  int64_t run = 0;
  std::vector<std::pair<int64_t, int64_t>> repeats;  // strides are positive, outermost first
};

/// The same bytes with as few repeats as possible: strides sorted, what touches or overlaps joined into longer runs.
Extent normalized(const Extent& extent);
/// Whether two extents share a byte: exact for strided ones, whatever their number of runs.
bool overlap(const Extent& a, const Extent& b);

/// One frame of a stack, innermost first in a list of them.
struct Frame {
  std::string file;
  int64_t line = 0;
  std::string function;
};

/// The stack of an operation: gathered when it is issued, turned into text only when somebody asks.
struct Stack {
  virtual ~Stack() = default;
  /// Innermost first. May take the interpreter's lock: it is never called under the checker's.
  virtual std::vector<Frame> frames() const = 0;
};

/// What made an access. Built before the checker is called; never read or destroyed under its lock.
struct Site {
  std::string op;                      // "aten::add_.Tensor", "all_gather_into_tensor", "free"
  std::string label;                   // module, unit or phase, where somebody has named it
  std::string tensor;                  // name of the tensor, where known
  std::shared_ptr<const Stack> stack;  // null: none was gathered
};
using SitePtr = std::shared_ptr<const Site>;

struct Access {
  Kind kind = Kind::Read;
  Lane lane = kHost;
  uint64_t tick = 0;
  Extent extent;
  SitePtr site;
  uint64_t allocation = 0;  // counts the allocations of the block: another number is an earlier tenant of the memory
};

enum class HazardKind : uint8_t {
  ReadAfterWrite,
  WriteAfterRead,
  WriteAfterWrite,
  ReuseInFlight,      // the earlier access belongs to memory that was freed: missing record_stream, or freed too early
  HostWriteInFlight,  // the host wrote into pinned memory that a copy was still using
  HostReadInFlight,   // the host read pinned memory before the copy into it was done
};

struct Hazard {
  HazardKind kind = HazardKind::ReadAfterWrite;
  Access then;           // the earlier access, in program order
  Access now;            // the one that does not wait for it
  BlockId block = 0;     // that `now` touches: counted from 1 within its device, so that two runs agree
  uint64_t bytes = 0;    // of the block
  int32_t device = 0;
  bool pinned = false;
  SitePtr allocated;     // where the memory that `now` touches was allocated
  SitePtr freed;         // for ReuseInFlight: where the earlier tenant was freed
  Lane tenant_lane = kHost;  // the lane that the memory of `then` was allocated on
  BlockId then_block = 0;    // another block than `block` only in Reuse::WorstCase
  uint64_t then_bytes = 0;
  uint64_t count = 0;  // equal hazards are folded: same kind, device, ops, labels, lanes and stacks
};

/// Whose unfinished accesses a new allocation meets.
enum class Reuse : uint8_t {
  Exact,      // those of the block that it got
  WorstCase,  // and of every free block that a caching allocator could have given it instead
};

class Checker {
 public:
  /// The one of this process. Tests make their own.
  static Checker& get();
  Checker();
  ~Checker();
  Checker(const Checker&) = delete;
  Checker& operator=(const Checker&) = delete;

  Mode mode() const;
  void set_mode(Mode mode);
  Reuse reuse() const;
  /// Blocks that are free at a change to WorstCase do not take part until they are freed anew.
  void set_reuse(Reuse reuse);

  // Lanes and their clocks.
  Lane add_lane(std::string name, int32_t device);
  std::string lane_name(Lane lane) const;
  void rename_lane(Lane lane, std::string name);
  int32_t lane_device(Lane lane) const;
  /// Counted from 0 within the device, in the order of creation; the host is 0 of device -1.
  int32_t lane_number(Lane lane) const;
  size_t num_lanes() const;
  /// The host puts an operation on a lane: the lane knows what the host knows, and counts one more operation.
  void submit(Lane lane);
  /// What an event holds that is recorded on the lane now.
  Clock snapshot(Lane lane) const;
  // Each returns whether the wait taught the waiting side something: one that does not is redundant.
  bool wait(Lane lane, const Clock& clock);
  bool host_wait(const Clock& clock);
  bool host_wait_lane(Lane lane);
  bool host_wait_device(int32_t device);
  /// Whether the host knows that everything in the clock has ended.
  bool host_knows(const Clock& clock) const;

  // Memory. A block keeps its history over free and allocation, so that what a former tenant left in flight is seen.
  // These three are followed inside a suspension and in Mode::Off, too.
  BlockId add_block(uint64_t bytes, int32_t device, bool pinned);
  /// The memory goes back to the system, which waits for everything that uses it.
  void remove_block(BlockId block);
  /// A new tenant. `lane`: the stream that the caching allocator serves, kHost for pinned memory. No access by itself.
  void allocated(BlockId block, Lane lane, SitePtr site);
  void freed(BlockId block, SitePtr site);
  /// `Tensor.record_stream`: at its free the block is kept from reuse until what the lane has been given is done.
  void record_stream(BlockId block, Lane lane);

  /// Note an access of the lane's current operation (submit() comes first, except for the host). Returns the hazard it
  /// makes, if it makes one: the caller raises (Mode::Raise) or overwrites the result (Mode::Poison) after this call,
  /// without the lock.
  ///
  /// From then on the wait that is missing counts as made, so that it is reported where it belongs and not again with
  /// every later operation. Of the accesses of one other lane only the last is reported: who waits for it has waited
  /// for the others.
  std::optional<Hazard> access(BlockId block, Kind kind, const Extent& extent, Lane lane, const SitePtr& site);

  /// While this thread is suspended nothing that it does is checked, noted or counted as a synchronisation. An event
  /// that it records there holds the clock of before. Suspensions nest.
  static void suspend();
  static void resume();
  static bool suspended();

  /// By device, then in the order in which they were first seen.
  std::vector<Hazard> hazards() const;
  size_t num_hazards() const;
  /// Those of a device, or all.
  void clear_hazards(std::optional<int32_t> device = std::nullopt);
  /// Forget who touched what, on a device or everywhere; clocks and blocks stay. For the border between two runs.
  void clear_history(std::optional<int32_t> device = std::nullopt);
  /// Accesses checked since the start: a run without any has tested nothing.
  uint64_t accesses() const;
  /// From now on sum up, for each device, what each access knew of the other streams of the device.
  ///
  /// The sum depends on the program alone: streams are counted by their first access, operations from now on. A program
  /// that has the same sum with a wait as without it never knew less without it: the wait is redundant.
  void begin_order_digest();
  uint64_t order_digest(int32_t device) const;
  /// Accesses that are held now, for tests: of one block, and of all.
  size_t history_size(BlockId block) const;
  size_t history_size() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sim
