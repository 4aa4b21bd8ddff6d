// The Work of a collective on the simulated accelerator. It behaves like WorkNCCL.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "checker.h"
#include "deliveries.h"
#include "transport.h"

namespace sim {

/// Keeps memory alive until a collective has run on its stream: NCCL's TensorShelf, shared by Work and group.
class Shelf {
 public:
  Shelf(const std::vector<at::Tensor>& tensors, Clock end);
  /// Release the memory: a stream that reuses it has been made to wait, or the host knows that the collective has run.
  void clear();
  /// True if it is cleared now or was before. With the checker off, the host counts as knowing everything.
  bool clear_if_host_knows();
  /// The owner goes away: from now on the host's waits release the memory.
  void leave();

 private:
  std::vector<c10::Storage> take();

  std::mutex mutex_;
  const Clock end_;
  std::vector<c10::Storage> storages_;
};

/// State shared by a group and its Works.
class GroupState {
 public:
  GroupState(std::string name, int rank, std::shared_ptr<Transport> transport);
  /// Gloo joins its threads, so the GIL is released.
  ~GroupState();

  /// A call has been started. Drops the calls that have ended; a failed one fails the group.
  void started(const std::shared_ptr<CollectiveCall>& call);
  /// Every pending and every later call fails with this reason.
  void abort(const std::string& reason);
  /// Wait until every call has ended. A failure that has not been reported yet becomes a warning.
  void drain();

  const std::string name;
  const int rank;
  std::shared_ptr<Transport> transport;

 private:
  std::vector<std::shared_ptr<CollectiveCall>> take();

  std::mutex mutex_;
  std::vector<std::shared_ptr<CollectiveCall>> underway_;
};

/// The end of a collective on a stream, for whatever waits for it.
struct End {
  c10::Stream stream;
  Clock clock;
  std::shared_ptr<Shelf> shelf;
  Mark mark;
};

class SimWork : public c10d::Work {
 public:
  /// `end`: nothing for a Work on CPU tensors, for which the host waits.
  SimWork(
      std::shared_ptr<GroupState> group, std::shared_ptr<CollectiveCall> call, c10d::OpType type, uint64_t seq,
      const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs, std::optional<End> end);

  /// Complete the future on the stream. Call it once something holds the Work.
  void complete_future();
  /// Make it a barrier: `wait` blocks the host.
  void set_barrier();
  /// An all-gather of equal tensors: its future has them in one tensor, as NCCL's has its own buffer.
  void set_stacked();

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream();  // an override since torch 2.9
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  std::vector<at::Tensor> result() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

 private:
  void wait_on_host(std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10::ivalue::Future> future_on_stream() const;

  const std::shared_ptr<GroupState> group_;
  const std::shared_ptr<CollectiveCall> call_;
  const std::vector<at::Tensor> outputs_;
  const std::optional<End> end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> result_;
  const uint64_t seq_;
  const int64_t numel_in_;
  const int64_t numel_out_;
  const std::chrono::steady_clock::time_point started_;
  c10::intrusive_ptr<c10::ivalue::Future> stacked_future_;  // made when it is asked for
  bool barrier_ = false;
  bool stacked_ = false;
};

}  // namespace sim
