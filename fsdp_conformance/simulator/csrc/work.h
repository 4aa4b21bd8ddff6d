// The Work of a collective on the simulated accelerator: as WorkNCCL.
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

/// What must not be freed before a collective has run on its stream: NCCL's TensorShelf, shared by Work and group.
class Shelf {
 public:
  Shelf(const std::vector<at::Tensor>& tensors, Clock end);
  /// Let go of them: a stream that reuses their memory has been made to wait, or the host knows that it has run.
  void clear();
  /// True if it was cleared now or before. Where nothing is checked the host knows everything.
  bool clear_if_host_knows();
  /// Nobody looks after it any more: the host's waits do.
  void leave();

 private:
  std::vector<c10::Storage> take();

  std::mutex mutex_;
  const Clock end_;
  std::vector<c10::Storage> storages_;
};

/// What a group and its works have in common.
class GroupState {
 public:
  GroupState(std::string name, int rank, std::shared_ptr<Transport> transport);
  /// Gloo joins its threads: not with the GIL.
  ~GroupState();

  /// A call that has been started. Those that have ended are dropped; if one has failed, the group has.
  void started(const std::shared_ptr<CollectiveCall>& call);
  /// Every call under way and every later one fails with this reason.
  void abort(const std::string& reason);
  /// Wait until every call has ended. A failure that nobody has seen yet becomes a warning.
  void drain();

  const std::string name;
  const int rank;
  std::shared_ptr<Transport> transport;

 private:
  std::vector<std::shared_ptr<CollectiveCall>> take();

  std::mutex mutex_;
  std::vector<std::shared_ptr<CollectiveCall>> underway_;
};

/// What the end of a collective on a stream is to others.
struct End {
  c10::Stream stream;
  Clock clock;
  std::shared_ptr<Shelf> shelf;
};

class SimWork : public c10d::Work {
 public:
  /// `end`: nothing for a work on CPU tensors, which is waited for on the host.
  SimWork(
      std::shared_ptr<GroupState> group, std::shared_ptr<CollectiveCall> call, c10d::OpType type, uint64_t seq,
      const std::string& title, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs,
      std::optional<End> end);

  /// Complete the future on the stream. Once the work is held by somebody.
  void complete_future();
  /// A barrier: `wait` is the host's.
  void set_barrier();

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream();  // from torch 2.9 on an override
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  std::vector<at::Tensor> result() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

 private:
  void wait_on_host(std::chrono::milliseconds timeout);

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
  bool barrier_ = false;
};

}  // namespace sim
