// The transport between ranks that are threads of one process. Ranks put their requests into a shared object. A rank
// that needs a result waits for the requests that contribute to it, and computes its own part. So no thread works for
// the others, and no rank waits for a rank whose bytes it does not receive.
#include "transport.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>

namespace sim {
namespace {

using std::chrono::steady_clock;

/// One collective: the requests of the ranks that have reached it.
struct Meeting {
  explicit Meeting(int size) : requests(size) {}

  std::vector<std::optional<Request>> requests;  // by rank; never changed once set
  int arrived = 0;
  std::once_flag reduced_once;
  std::vector<at::Tensor> reduced;  // for an all-reduce: computed by the first rank that needs it
};

/// The n-th message from one rank to another: whichever side comes first waits here for the other.
struct Message {
  std::optional<Request> sent;
  std::optional<Request> expected;
};

struct Channel {
  std::map<uint64_t, std::shared_ptr<Message>> open;  // messages with one side missing
  uint64_t num_sent = 0;
  uint64_t num_expected = 0;
};

struct Group {
  Group(std::string name, int size) : name(std::move(name)), size(size), issued(size, 0), last(size) {}

  void fail(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex);
    if (failure.empty()) {
      failure = reason;
    }
    changed.notify_all();
  }

  const std::string name;
  const int size;
  int joined = 0;  // guarded by worlds_mutex
  std::mutex mutex;
  std::condition_variable changed;
  std::string failure;                                // why all requests fail; empty if they do not
  std::vector<uint64_t> issued;                       // by rank: the number of collectives it has reached
  std::vector<std::string> last;                      // by rank: the latest collective
  std::map<uint64_t, std::shared_ptr<Meeting>> open;  // by number: collectives that some rank has yet to reach
  std::map<std::pair<int, int>, Channel> channels;    // by sender and receiver
};

struct World {
  std::string failure;
  std::map<std::string, std::shared_ptr<Group>> forming;  // groups that some rank has yet to join
  std::vector<std::weak_ptr<Group>> groups;
  std::map<std::pair<std::string, int>, int> joined;  // how often a rank has joined a group of this name
};

std::mutex worlds_mutex;

std::map<std::string, World>& worlds() {
  static auto* all = new std::map<std::string, World>();  // Outlives the threads of a process that exits abruptly.
  return *all;
}

std::shared_ptr<const Waiter>& waiter_in_use() {
  static auto* waiter = new std::shared_ptr<const Waiter>();
  return *waiter;
}

std::shared_ptr<const Waiter> thread_waiter() {
  return std::atomic_load(&waiter_in_use());
}

/// The numbers of elements that must agree on all ranks.
std::vector<int64_t> common_sizes(const Request& request, int rank) {
  std::vector<int64_t> sizes;
  switch (request.op) {
    case Op::Broadcast:
      return {rank == request.root ? request.give.at(0).numel() : request.take.at(0)};
    case Op::Scatter:
      return request.take;
    case Op::AllToAll:
      return {};  // Each pair of ranks agrees on its own.
    default:
      for (const auto& tensor : request.give) {
        sizes.push_back(tensor.numel());
      }
      return sizes;
  }
}

/// Why two ranks' requests are not the same collective; empty if they are.
std::string mismatch(const Request& one, int one_rank, const Request& other, int other_rank) {
  auto both = [&](const std::string& what) {
    return c10::str(
        "rank ", other_rank, " called ", other.call, ", but rank ", one_rank, " called ", one.call, ": ", what,
        " differ");
  };
  if (one.op != other.op) {
    return both("the operations");
  }
  if (one.dtype != other.dtype) {
    return both("the dtypes");
  }
  if (one.reduce != other.reduce) {
    return both("the reductions");
  }
  if (one.root != other.root) {
    return both("the roots");
  }
  if (common_sizes(one, one_rank) != common_sizes(other, other_rank)) {
    return both("the sizes");
  }
  if (one.op == Op::AllToAll &&
      (one.give.at(other_rank).numel() != other.take.at(one_rank) ||
       other.give.at(one_rank).numel() != one.take.at(other_rank))) {
    return both("what one sends and what the other expects");
  }
  return "";
}

at::Tensor reduce(const std::vector<at::Tensor>& tensors, c10d::ReduceOp::RedOpType op) {
  at::Tensor result = tensors.at(0).clone();
  for (size_t i = 1; i < tensors.size(); ++i) {
    switch (op) {
      case c10d::ReduceOp::SUM:
        result.add_(tensors[i]);
        break;
      case c10d::ReduceOp::PRODUCT:
        result.mul_(tensors[i]);
        break;
      case c10d::ReduceOp::MIN:
        at::minimum_out(result, result, tensors[i]);
        break;
      case c10d::ReduceOp::MAX:
        at::maximum_out(result, result, tensors[i]);
        break;
      default:
        TORCH_CHECK(false, "reduction ", static_cast<int>(op), " is not SUM, PRODUCT, MIN or MAX [thread transport]");
    }
  }
  return result;
}

/// The common part of a rank's pending requests: waiting for a condition under the group's lock.
class Underway : public Exchange {
 public:
  Underway(std::shared_ptr<Group> group, int rank, Deadline deadline)
      : group_(std::move(group)), rank_(rank), deadline_(deadline) {}

  bool done() override {
    std::lock_guard<std::mutex> lock(group_->mutex);
    return ready() || !group_->failure.empty();
  }

  bool wait(std::optional<Deadline> deadline) override {
    if (const auto waiter = thread_waiter()) {
      (*waiter)([this] { return done(); }, [this] { return described(); });
    }
    const auto until = deadline.value_or(deadline_);
    std::unique_lock<std::mutex> lock(group_->mutex);
    if (!group_->changed.wait_until(lock, until, [&] { return ready() || !group_->failure.empty(); })) {
      if (deadline) {
        return false;
      }
      group_->failure = c10::str("rank ", rank_, " waited too long: ", missing());
      group_->changed.notify_all();
    }
    if (!ready()) {
      const std::string failure = group_->failure;
      lock.unlock();
      C10_THROW_ERROR(DistBackendError, failure);
    }
    return true;
  }

  void abort(const std::string& reason) override {
    group_->fail(reason);
  }

 protected:
  // Called under the group's lock.
  virtual bool ready() const = 0;
  virtual std::string missing() const = 0;

  std::string described() {
    std::lock_guard<std::mutex> lock(group_->mutex);
    return missing();
  }

  const std::shared_ptr<Group> group_;
  const int rank_;
  const Deadline deadline_;
};

class Collective : public Underway {
 public:
  Collective(
      std::shared_ptr<Group> group, int rank, Deadline deadline, std::shared_ptr<Meeting> meeting, uint64_t number)
      : Underway(std::move(group), rank, deadline), meeting_(std::move(meeting)), number_(number) {}

  std::vector<at::Tensor> results() override {
    PlainKernels plain;
    const auto& own = *meeting_->requests[rank_];
    switch (own.op) {
      case Op::AllReduce:
        std::call_once(meeting_->reduced_once, [&] {
          for (size_t i = 0; i < own.give.size(); ++i) {
            meeting_->reduced.push_back(reduce(given(i), own.reduce));
          }
        });
        return meeting_->reduced;
      case Op::Reduce:
        return rank_ == own.root ? std::vector<at::Tensor>{reduce(given(0), own.reduce)} : std::vector<at::Tensor>{};
      case Op::ReduceScatter: {
        const int64_t numel = own.take.at(0);
        std::vector<at::Tensor> parts;
        for (const auto& whole : given(0)) {
          parts.push_back(whole.narrow(0, rank_ * numel, numel));
        }
        return {reduce(parts, own.reduce)};
      }
      case Op::AllGather:
        return given(0);
      case Op::Gather:
        return rank_ == own.root ? given(0) : std::vector<at::Tensor>{};
      case Op::Broadcast:
        return rank_ == own.root ? std::vector<at::Tensor>{} : meeting_->requests[own.root]->give;
      case Op::Scatter:
        return {meeting_->requests[own.root]->give.at(rank_)};
      default:
        return given(rank_);
    }
  }

 protected:
  bool ready() const override {
    const auto& own = *meeting_->requests[rank_];
    switch (own.op) {
      case Op::Broadcast:
      case Op::Scatter:
        return meeting_->requests[own.root].has_value();
      case Op::Gather:
      case Op::Reduce:
        return rank_ != own.root || meeting_->arrived == group_->size;
      default:
        return meeting_->arrived == group_->size;
    }
  }

  std::string missing() const override {
    std::ostringstream text;
    text << meeting_->requests[rank_]->call << ", collective " << number_ << " of group " << group_->name
         << "; not there:";
    for (int rank = 0; rank < group_->size; ++rank) {
      if (!meeting_->requests[rank]) {
        text << " rank " << rank << " (at collective " << group_->issued[rank];
        if (group_->issued[rank]) {
          text << ", " << group_->last[rank];
        }
        text << ");";
      }
    }
    return text.str();
  }

 private:
  /// The tensor number `which` of every rank.
  std::vector<at::Tensor> given(size_t which) const {
    std::vector<at::Tensor> all;
    for (const auto& request : meeting_->requests) {
      all.push_back(request->give.at(which));
    }
    return all;
  }

  const std::shared_ptr<Meeting> meeting_;
  const uint64_t number_;
};

class PointToPoint : public Underway {
 public:
  PointToPoint(
      std::shared_ptr<Group> group, int rank, Deadline deadline, std::shared_ptr<Message> message, bool receives)
      : Underway(std::move(group), rank, deadline), message_(std::move(message)), receives_(receives) {}

  std::vector<at::Tensor> results() override {
    return receives_ ? message_->sent->give : std::vector<at::Tensor>{};
  }

 protected:
  bool ready() const override {
    return message_->sent && message_->expected;
  }

  std::string missing() const override {
    const auto& own = receives_ ? *message_->expected : *message_->sent;
    return c10::str(own.call, " in group ", group_->name, "; rank ", own.root, " has not answered it");
  }

 private:
  const std::shared_ptr<Message> message_;
  const bool receives_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::string world, std::shared_ptr<Group> group, int rank, std::chrono::milliseconds timeout)
      : world_(std::move(world)), group_(std::move(group)), rank_(rank), timeout_(timeout) {}

  std::shared_ptr<Exchange> start(Request request) override {
    std::lock_guard<std::mutex> lock(group_->mutex);
    if (!group_->failure.empty()) {
      C10_THROW_ERROR(DistBackendError, c10::str(request.call, " after a failure: ", group_->failure));
    }
    const auto deadline = steady_clock::now() + timeout_;
    if (request.op == Op::Send || request.op == Op::Recv) {
      return post(std::move(request), deadline);
    }
    const uint64_t number = ++group_->issued[rank_];
    group_->last[rank_] = request.call;
    auto& meeting = group_->open[number];
    if (!meeting) {
      meeting = std::make_shared<Meeting>(group_->size);
    }
    for (int rank = 0; rank < group_->size; ++rank) {
      const auto& other = meeting->requests[rank];
      const auto reason = other ? mismatch(*other, rank, request, rank_) : "";
      if (!reason.empty()) {
        fail(c10::str("collective ", number, " of group ", group_->name, ": ", reason));
      }
      if (other && request.op != Op::AllToAll) {
        break;  // The other ranks were compared with this one.
      }
    }
    meeting->requests[rank_] = std::move(request);
    auto exchange = std::make_shared<Collective>(group_, rank_, deadline, meeting, number);
    if (++meeting->arrived == group_->size) {
      group_->open.erase(number);
    }
    group_->changed.notify_all();
    return exchange;
  }

  void set_timeout(std::chrono::milliseconds timeout) override {
    std::lock_guard<std::mutex> lock(group_->mutex);
    timeout_ = timeout;
  }

  std::shared_ptr<Transport> split(
      const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks, const std::string& name,
      std::chrono::milliseconds timeout) override {
    const auto place = std::find(ranks.begin(), ranks.end(), rank_);
    TORCH_CHECK(place != ranks.end(), "rank ", rank_, " is not in the subgroup that it splits off [split]");
    std::ostringstream unique;
    unique << group_->name << "/" << name << "[";
    for (int rank : ranks) {
      unique << rank << ",";
    }
    return thread_transport(
        world_, unique.str() + "]", static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()), timeout);
  }

  void abort(const std::string& reason) override {
    group_->fail(reason);
  }

 private:
  // Call these under the group's lock.
  [[noreturn]] void fail(const std::string& reason) {
    group_->failure = reason;
    group_->changed.notify_all();
    C10_THROW_ERROR(DistBackendError, reason);
  }

  std::shared_ptr<Exchange> post(Request request, Deadline deadline) {
    const bool receives = request.op == Op::Recv;
    const auto ends = receives ? std::make_pair(request.root, rank_) : std::make_pair(rank_, request.root);
    auto& channel = group_->channels[ends];
    const uint64_t number = receives ? channel.num_expected++ : channel.num_sent++;
    auto& message = channel.open[number];
    if (!message) {
      message = std::make_shared<Message>();
    }
    (receives ? message->expected : message->sent) = std::move(request);
    auto exchange = std::make_shared<PointToPoint>(group_, rank_, deadline, message, receives);
    if (message->sent && message->expected) {
      const auto& sent = *message->sent;
      const auto& expected = *message->expected;
      channel.open.erase(number);
      if (sent.dtype != expected.dtype || sent.give.at(0).numel() != expected.take.at(0)) {
        fail(
            c10::str(
                "group ", group_->name, ": rank ", ends.first, " called ", sent.call, ", but rank ", ends.second,
                " called ", expected.call, ": the sizes or dtypes differ"));
      }
      group_->changed.notify_all();
    }
    return exchange;
  }

  const std::string world_;
  const std::shared_ptr<Group> group_;
  const int rank_;
  std::chrono::milliseconds timeout_;
};

}  // namespace

std::shared_ptr<Transport> thread_transport(
    const std::string& world, const std::string& group, int rank, int size, std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(worlds_mutex);
  auto& place = worlds()[world];
  // A name may be reused after its group was destroyed: a rank's n-th join is to the n-th group of that name.
  const auto name = c10::str(group, "#", place.joined[{group, rank}]++);
  auto joined = place.forming[name];
  if (!joined) {
    joined = place.forming[name] = std::make_shared<Group>(group, size);
    joined->failure = place.failure;
    place.groups.push_back(joined);
  }
  TORCH_CHECK(
      joined->size == size, "size must be ", joined->size, ", as on the group's other ranks, got ", size,
      " [thread group ", group, "]");
  if (++joined->joined == size) {
    place.forming.erase(name);
  }
  return std::make_shared<ThreadTransport>(world, std::move(joined), rank, timeout);
}

void abort_thread_world(const std::string& world, const std::string& reason) {
  std::vector<std::shared_ptr<Group>> groups;
  {
    std::lock_guard<std::mutex> lock(worlds_mutex);
    auto& place = worlds()[world];
    if (place.failure.empty()) {
      place.failure = reason;
    }
    for (auto& group : place.groups) {
      if (auto alive = group.lock()) {
        groups.push_back(std::move(alive));
      }
    }
  }
  for (const auto& group : groups) {
    group->fail(reason);
  }
}

void set_thread_waiter(Waiter waiter) {
  std::atomic_store(&waiter_in_use(), waiter ? std::make_shared<const Waiter>(std::move(waiter)) : nullptr);
}

bool threads_take_turns() {
  return thread_waiter() != nullptr;
}

void forget_thread_world(const std::string& world) {
  std::lock_guard<std::mutex> lock(worlds_mutex);
  worlds().erase(world);
}

}  // namespace sim
