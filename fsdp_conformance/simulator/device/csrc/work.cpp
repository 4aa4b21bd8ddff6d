#include "work.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <numeric>
#include <thread>

#include "gpu_trace.h"
#include "runtime.h"

namespace sim {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;

namespace {

int64_t numel_of(const Tensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0}, [](int64_t sum, const at::Tensor& tensor) {
    return sum + tensor.numel();
  });
}

}  // namespace

Shelf::Shelf(const Tensors& tensors, Clock end) : end_(std::move(end)) {
  for (const auto& tensor : tensors) {
    storages_.push_back(tensor.storage());
  }
}

std::vector<c10::Storage> Shelf::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(storages_, {});
}

void Shelf::clear() {
  take();  // Destroyed here, without the lock, because freeing memory can take the GIL.
}

bool Shelf::clear_if_host_knows() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (storages_.empty()) {
      return true;
    }
  }
  if (Checker::get().mode() != Mode::Off && !Checker::get().host_knows(end_)) {
    return false;
  }
  clear();
  return true;
}

void Shelf::leave() {
  auto storages = take();
  if (!storages.empty()) {
    keep_until_host_knows(end_, std::move(storages));
  }
}

GroupState::GroupState(std::string name, int rank, std::shared_ptr<Transport> transport)
    : name(std::move(name)), rank(rank), transport(std::move(transport)) {}

GroupState::~GroupState() {
  WithoutGil released;
  underway_.clear();
  transport.reset();
}

std::vector<std::shared_ptr<CollectiveCall>> GroupState::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(underway_, {});
}

void GroupState::started(const std::shared_ptr<CollectiveCall>& call) {
  std::vector<std::shared_ptr<CollectiveCall>> ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<CollectiveCall>> under_way;
    for (auto& earlier : underway_) {
      // A failed call stays, so that `drain` can report its failure if nothing else has.
      const bool has_ended = earlier->done() && earlier->failure().empty();
      (has_ended ? ended : under_way).push_back(std::move(earlier));
    }
    under_way.push_back(call);
    underway_ = std::move(under_way);
  }
  for (const auto& earlier : ended) {
    try {
      earlier->finish(std::nullopt, /*needs_results=*/false);  // The peers have come, so this does not wait.
    } catch (const std::exception& error) {
      transport->abort(message_of(error));
      std::lock_guard<std::mutex> lock(mutex_);
      underway_.push_back(earlier);
    }
  }
}

void GroupState::abort(const std::string& reason) {
  transport->abort(reason);
  for (const auto& call : take()) {
    call->abort(reason);
  }
}

void GroupState::drain() {
  for (const auto& call : take()) {
    // After a failure there is nothing to wait for: the transport has failed, and with it all other calls.
    if (call->has_reported_failure()) {
      return;
    }
    try {
      call->finish(std::nullopt);
    } catch (const std::exception& error) {
      TORCH_WARN("group ", name, " was shut down on rank ", rank, " with a failed collective: ", message_of(error));
      return;
    }
  }
}

SimWork::SimWork(
    std::shared_ptr<GroupState> group, std::shared_ptr<CollectiveCall> call, c10d::OpType type, uint64_t seq,
    const Tensors& inputs, Tensors outputs, std::optional<End> end)
    : Work(group->rank, type),
      group_(std::move(group)),
      call_(std::move(call)),
      outputs_(std::move(outputs)),
      end_(std::move(end)),
      seq_(seq),
      numel_in_(numel_of(inputs)),
      numel_out_(numel_of(outputs_)),
      started_(steady_clock::now()) {}

void SimWork::complete_future() {
  c10::StreamGuard guard(end_->stream);
  future_ = future_on_stream();
  future_->markCompleted(c10::IValue(outputs_));
}

c10::intrusive_ptr<c10::ivalue::Future> SimWork::future_on_stream() const {
  const std::vector<c10::Device> devices = {end_->stream.device()};
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
}

void SimWork::set_stacked() {
  stacked_ = true;
}

void SimWork::set_barrier() {
  barrier_ = true;
}

bool SimWork::isCompleted() {
  if (!call_->done() || (end_ && !settled_until(end_->clock))) {
    return false;
  }
  if (end_) {
    host_waits(
        end_->clock, end_->stream, end_->mark);  // As for an event: a caller that is told so knows that it has run.
  }
  return true;
}

bool SimWork::isSuccess() const {
  C10_THROW_ERROR(NotImplementedError, "Work.is_success() is deprecated, as ProcessGroupNCCL's");
}

std::exception_ptr SimWork::exception() const {
  const auto failure = call_->failure();
  return failure.empty() ? nullptr : std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, failure));
}

void SimWork::synchronize() {
  if (end_) {
    const auto current = current_stream(end_->stream.device_index());
    stream_waits(current, end_->clock, Wait::WorkWait, end_->mark);
    trace_wait(end_->shelf.get(), current);
    end_->shelf->clear();
  }
  if (c10d::allow_inflight_collective_as_graph_input()) {
    c10d::unregister_work(c10::intrusive_ptr<SimWork>::unsafe_reclaim_from_nonowning(this));
  }
}

bool SimWork::wait(milliseconds timeout) {
  synchronize();
  if (timeout != kNoTimeout) {
    wait_on_host(timeout);
  } else if (!end_ || barrier_) {
    WithoutGil released;
    call_->finish(std::nullopt);
  }
  if (end_ && barrier_) {
    const auto current = current_stream(end_->stream.device_index());
    host_waits_stream(current);
    trace_host_wait(current);
  }
  return true;
}

void SimWork::wait_on_host(milliseconds timeout) {
  bool in_time = false;
  {
    WithoutGil released;
    in_time = call_->finish(steady_clock::now() + timeout);
  }
  if (!in_time) {
    // As with NCCL, a Work that is too late takes its group down.
    const auto ran = std::chrono::duration_cast<milliseconds>(steady_clock::now() - started_);
    const auto reason = c10::str(
        "[Rank ", group_->rank, "] Watchdog caught collective operation timeout: WorkSim(SeqNum=", seq_,
        ", OpType=", c10d::opTypeToString(opType_), ", NumelIn=", numel_in_, ", NumelOut=", numel_out_,
        ", Timeout(ms)=", timeout.count(), ") ran for ", ran.count(), " milliseconds before timing out.");
    group_->abort(reason);
    C10_THROW_ERROR(DistBackendError, reason);
  }
  if (end_) {
    host_waits(end_->clock, end_->stream, end_->mark);
  }
}

void SimWork::blockCurrentStream() {
  synchronize();
}

void SimWork::abort() {
  group_->abort(c10::str("Work.abort() was called on rank ", group_->rank, " of group ", group_->name));
}

c10::intrusive_ptr<c10::ivalue::Future> SimWork::getFuture() {
  if (stacked_) {
    if (!stacked_future_) {
      c10::StreamGuard guard(end_->stream);
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      auto future = future_on_stream();
      future->markCompleted(c10::IValue(Tensors{at::stack(outputs_)}));
      stacked_future_ = std::move(future);
    }
    return stacked_future_;
  }
  if (!future_) {
    // On the CPU the future is complete when the bytes are in place; a thread waits for that.
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    std::thread([call = call_, future, outputs = outputs_] {
      try {
        call->finish(std::nullopt);
        future->markCompleted(c10::IValue(outputs));
      } catch (const std::exception&) {
        future->setError(std::current_exception());
      }
    }).detach();
    future_ = std::move(future);
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> SimWork::getFutureResult() {
  if (!result_) {
    auto result = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
    std::thread([call = call_, result] {
      auto how = c10d::WorkResult::SUCCESS;
      try {
        call->finish(std::nullopt);
      } catch (const std::exception&) {
        how = c10d::WorkResult::COMM_ERROR;
      }
      result->markCompleted(c10::IValue(static_cast<uint8_t>(how)));
    }).detach();
    result_ = std::move(result);
  }
  return result_;
}

Tensors SimWork::result() {
  return outputs_;
}

float SimWork::getDuration() const {
  TORCH_CHECK(false, "getDuration only works if timing was enabled, and simccl measures no time");
}

uint64_t SimWork::getSequencenumber() const {
  return seq_;
}

}  // namespace sim
