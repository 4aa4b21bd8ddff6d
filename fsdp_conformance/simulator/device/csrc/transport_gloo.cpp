// The transport between processes: torch's gloo backend on host memory. Gloo's own threads do the work, so nothing
// blocks before a result is waited for.
#include "transport.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <numeric>
#include <thread>

#include "staging.h"
#include "torch_version.h"

namespace sim {

namespace {

struct Explaining {
  std::mutex mutex;
  std::shared_ptr<const Explainer> explainer;
};

// Never destroyed: gloo's threads may fail while the process exits.
Explaining& explaining() {
  static auto* all = new Explaining();
  return *all;
}

std::string explanation() {
  std::shared_ptr<const Explainer> explainer;
  {
    std::lock_guard<std::mutex> lock(explaining().mutex);
    explainer = explaining().explainer;
  }
  return explainer ? (*explainer)() : std::string();
}

/// A Work of gloo's. Most report completion through their future. Some do part of their job in `wait` (send, recv, and
/// reduce-scatter in some versions): the first caller that needs one of these waits for it.
class GlooExchange : public Exchange, public std::enable_shared_from_this<GlooExchange> {
 public:
  GlooExchange(std::string call, c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> results)
      : call_(std::move(call)), work_(std::move(work)), results_(std::move(results)) {}

  void follow(c10::ivalue::Future& future) {
    waited_ = true;
    future.addCallback([weak = weak_from_this()](c10::ivalue::Future& ended) {
      if (const auto self = weak.lock()) {
        self->end(ended.hasError() ? self->call_ + " failed: " + ended.tryRetrieveErrorMessage() : "");
      }
    });
  }

  bool done() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (ended_) {
        return true;
      }
    }
    wait_in_thread();
    return false;
  }

  bool wait(std::optional<Deadline> deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!waited_) {
      if (deadline) {
        lock.unlock();
        wait_in_thread();
      } else {
        waited_ = true;
        lock.unlock();
        wait_for_work();
      }
      lock.lock();
    }
    const auto ended = [&] { return ended_; };
    if (!deadline) {
      changed_.wait(lock, ended);  // Gloo has its own deadline for everything.
    } else if (!changed_.wait_until(lock, *deadline, ended)) {
      return false;
    }
    if (!failure_.empty()) {
      std::string failure = failure_;
      const bool is_aborted = aborted_;
      lock.unlock();
      if (const auto why = is_aborted ? std::string() : explanation(); !why.empty()) {
        failure = c10::str(call_, " failed: ", why);
      }
      C10_THROW_ERROR(DistBackendError, failure);
    }
    return true;
  }

  std::vector<at::Tensor> results() override {
    return results_;
  }

  void abort(const std::string& reason) override {
    if (!end(c10::str(call_, ": ", reason), /*aborted=*/true)) {
      return;
    }
    try {
      work_->abort();  // Sends and receives can be aborted; other operations end at gloo's deadline.
    } catch (const std::exception&) {
      return;
    }
  }

 private:
  void wait_in_thread() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (waited_) {
        return;
      }
      waited_ = true;
    }
    std::thread([self = shared_from_this()] { self->wait_for_work(); }).detach();
  }

  void wait_for_work() {
    std::string failure;
    try {
      work_->wait();
    } catch (const std::exception& error) {
      failure = c10::str(call_, " failed: ", message_of(error));
    }
    end(failure);
  }

  /// False if it had already ended.
  bool end(const std::string& failure, bool aborted = false) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) {
      return false;
    }
    ended_ = true;
    aborted_ = aborted;
    failure_ = failure;
    changed_.notify_all();
    return true;
  }

  const std::string call_;
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::vector<at::Tensor> results_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool waited_ = false;  // a caller waits, or has waited, for the work
  bool ended_ = false;
  bool aborted_ = false;
  std::string failure_;
};

/// One end of a message from a rank to itself, which gloo cannot send. It has ended once the other end is there.
class OwnMessage : public Exchange {
 public:
  OwnMessage(std::string call, std::vector<at::Tensor> results, std::chrono::milliseconds timeout)
      : call_(std::move(call)), results_(std::move(results)), timeout_(timeout) {}

  bool done() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return ended_;
  }

  bool wait(std::optional<Deadline> deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool in_time = changed_.wait_until(
        lock, deadline.value_or(std::chrono::steady_clock::now() + timeout_), [&] { return ended_; });
    if (!in_time && deadline) {
      return false;
    }
    if (!in_time) {
      failure_ = c10::str(call_, " timed out after ", timeout_.count(), " ms: this rank has not called the other end");
    }
    if (!failure_.empty()) {
      C10_THROW_ERROR(DistBackendError, failure_);
    }
    return true;
  }

  std::vector<at::Tensor> results() override {
    return results_;
  }

  void abort(const std::string& reason) override {
    end(c10::str(call_, ": ", reason));
  }

  /// The other end is there: take what it sends.
  void take(const at::Tensor& sent) {
    auto& into = results_.at(0);
    if (into.numel() == sent.numel()) {
      into.copy_(sent);
      end("");
    } else {
      end(c10::str(call_, " expected ", into.numel(), " bytes, got ", sent.numel()));
    }
  }

  void end(const std::string& failure) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_) {
      ended_ = true;
      failure_ = failure;
    }
    changed_.notify_all();
  }

 private:
  const std::string call_;
  const std::vector<at::Tensor> results_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::string failure_;
};

/// The messages of a rank to itself. As with NCCL, the first send meets the first receive.
class OwnMessages {
 public:
  std::shared_ptr<Exchange> start(const Request& request, std::chrono::milliseconds timeout) {
    const bool sends = request.op == Op::Send;
    std::vector<at::Tensor> results;
    if (!sends) {
      results.push_back(staging(request.take.at(0), request.dtype));
    }
    auto message = std::make_shared<OwnMessage>(request.call, std::move(results), timeout);
    std::lock_guard<std::mutex> lock(mutex_);
    (sends ? sent_ : received_).push_back({message, sends ? request.give.at(0) : at::Tensor()});
    if (!sent_.empty() && !received_.empty()) {
      received_.front().message->take(sent_.front().data);
      sent_.front().message->end("");
      sent_.pop_front();
      received_.pop_front();
    }
    return message;
  }

 private:
  struct Waiting {
    std::shared_ptr<OwnMessage> message;
    at::Tensor data;
  };

  std::mutex mutex_;
  std::deque<Waiting> sent_;
  std::deque<Waiting> received_;
};

/// In torch 2.6 only gloo's own class has setTimeout, and its header is not installed.
template <typename Backend>
auto hand_on_timeout(Backend& backend, std::chrono::milliseconds timeout, int)
    -> decltype(backend.setTimeout(timeout)) {
  backend.setTimeout(timeout);
}
template <typename Backend>
void hand_on_timeout(Backend&, std::chrono::milliseconds, long) {
  TORCH_WARN_ONCE("The timeout of a group of simccl is fixed in this version of torch.");
}

class GlooTransport : public Transport {
 public:
  GlooTransport(
      MakeGloo make, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      std::chrono::milliseconds timeout)
      : make_(std::move(make)),
        gloo_(make_(store, rank, size, timeout)),
        rank_(rank),
        size_(size),
        timeout_ms_(timeout.count()) {}

  std::shared_ptr<Exchange> start(Request request) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_.empty()) {
        C10_THROW_ERROR(DistBackendError, c10::str(request.call, " after a failure: ", failure_));
      }
    }
    PlainKernels plain;
    if ((request.op == Op::Send || request.op == Op::Recv) && request.root == rank_) {
      return own_.start(request, std::chrono::milliseconds(timeout_ms_.load()));
    }
    // Profilers see the group's calls, not those of gloo.
    at::RecordFunctionGuard without_profiler(/*is_enabled=*/false);
    std::vector<at::Tensor> results;
    auto work = issue(request, results);
    auto exchange = std::make_shared<GlooExchange>(request.call, work, std::move(results));
    if (auto future = future_of(request.op, *work)) {
      exchange->follow(*future);
    }
    return exchange;
  }

  void set_timeout(std::chrono::milliseconds timeout) override {
    timeout_ms_ = timeout.count();
    hand_on_timeout(*gloo_, timeout, 0);
  }

  std::shared_ptr<Transport> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks, const std::string& name,
      std::chrono::milliseconds timeout) override {
    const auto place = std::find(ranks.begin(), ranks.end(), rank_);
    TORCH_CHECK(place != ranks.end(), "rank ", rank_, " is not in the subgroup ", name, " that it splits off [split]");
    return std::make_shared<GlooTransport>(
        make_, store, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()), timeout);
  }

  void abort(const std::string& reason) override {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = reason;
  }

 private:
  using Lists = std::vector<std::vector<at::Tensor>>;

  c10::intrusive_ptr<c10d::Work> issue(Request& request, std::vector<at::Tensor>& results) {
    auto& give = request.give;
    for (int64_t numel : request.take) {
      if (request.op != Op::AllReduce && request.op != Op::Reduce) {  // These two work in place, on our copies.
        results.push_back(staging(numel, request.dtype));
      }
    }
    switch (request.op) {
      case Op::AllReduce: {
        results = give;
        if (give.size() == 1) {
          c10d::AllreduceOptions opts;
          opts.reduceOp = request.reduce;
          return gloo_->allreduce(give, opts);
        }
        c10d::AllreduceCoalescedOptions opts;
        opts.reduceOp = request.reduce;
        return gloo_->allreduce_coalesced(give, opts);
      }
      case Op::Reduce: {
        c10d::ReduceOptions opts;
        opts.reduceOp = request.reduce;
        opts.rootRank = request.root;
        if (rank_ == request.root) {
          results = give;
        }
        return gloo_->reduce(give, opts);
      }
      case Op::ReduceScatter:
        return reduce_scatter(request, results.at(0));
      case Op::AllGather: {
        Lists outputs = {results};
        return gloo_->allgather(outputs, give);
      }
      case Op::Broadcast: {
        c10d::BroadcastOptions opts;
        opts.rootRank = request.root;
        return gloo_->broadcast(rank_ == request.root ? give : results, opts);
      }
      case Op::Gather: {
        c10d::GatherOptions opts;
        opts.rootRank = request.root;
        Lists outputs;
        if (rank_ == request.root) {
          outputs.push_back(results);
        }
        return gloo_->gather(outputs, give, opts);
      }
      case Op::Scatter: {
        c10d::ScatterOptions opts;
        opts.rootRank = request.root;
        Lists inputs;
        if (rank_ == request.root) {
          inputs.push_back(give);
        }
        return gloo_->scatter(results, inputs, opts);
      }
      case Op::AllToAll:
        return all_to_all(request, results);
      case Op::Send:
        return gloo_->send(give, request.root, 0);
      case Op::Recv:
        return gloo_->recv(results, request.root, 0);
    }
    TORCH_INTERNAL_ASSERT(false, "unknown operation ", static_cast<int>(request.op));
  }

  /// The future of a Work, if it has one.
  c10::intrusive_ptr<c10::ivalue::Future> future_of(Op op, c10d::Work& work) {
    if (op == Op::Send || op == Op::Recv || (op == Op::ReduceScatter && reduce_scatter_without_future_)) {
      return nullptr;
    }
    try {
      return work.getFuture();
    } catch (const c10::Error&) {
      TORCH_INTERNAL_ASSERT(op == Op::ReduceScatter, "gloo returned a Work without a future");
      reduce_scatter_without_future_ = true;
      return nullptr;
    }
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(Request& request, at::Tensor& result) {
    auto& whole = request.give.at(0);
#if !SIM_TORCH_AT_LEAST(2, 9)
    // Gloo's reduce-scatter always sums there, and before 2.7 it takes no lists.
    std::vector<at::Tensor> in_place = {whole};
    c10d::AllreduceOptions all;
    all.reduceOp = request.reduce;
    result = whole.chunk(size_)[rank_];
    return gloo_->allreduce(in_place, all);
#else
    c10d::ReduceScatterOptions opts;
    opts.reduceOp = request.reduce;
    if (!request.list) {
      return gloo_->_reduce_scatter_base(result, whole, opts);
    }
    std::vector<at::Tensor> outputs = {result};
    Lists inputs = {whole.chunk(size_)};
    return gloo_->reduce_scatter(outputs, inputs, opts);
#endif
  }

  c10::intrusive_ptr<c10d::Work> all_to_all(const Request& request, std::vector<at::Tensor>& results) {
    std::vector<int64_t> sends;
    for (const auto& part : request.give) {
      sends.push_back(part.numel());
    }
    auto receives = request.take;
    auto input = at::cat(request.give);
    auto output = staging(std::accumulate(receives.begin(), receives.end(), int64_t{0}), input.scalar_type());
    results = output.split_with_sizes(receives);
    return gloo_->alltoall_base(output, input, receives, sends);
  }

  const MakeGloo make_;
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const int rank_;
  const int size_;
  std::atomic<int64_t> timeout_ms_;
  OwnMessages own_;
  std::atomic<bool> reduce_scatter_without_future_{false};
  std::mutex mutex_;
  std::string failure_;
};

}  // namespace

void set_failure_explainer(Explainer explainer) {
  auto given = explainer ? std::make_shared<const Explainer>(std::move(explainer)) : nullptr;
  std::lock_guard<std::mutex> lock(explaining().mutex);
  explaining().explainer.swap(given);
}

std::shared_ptr<Transport> gloo_transport(
    MakeGloo make, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout) {
  return std::make_shared<GlooTransport>(std::move(make), store, rank, size, timeout);
}

}  // namespace sim
