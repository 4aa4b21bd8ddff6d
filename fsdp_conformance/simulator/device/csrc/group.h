// The process group of the simulated accelerator, "simccl": it treats streams, events, memory and the host as
// ProcessGroupNCCL does, over a transport in host memory.
//
// It follows the ProcessGroupNCCL of torch 2.8 and newer (that of 2.6 and 2.7, if torch is older):
// - async_op=True runs on a stream of the group, which first waits for the current stream; `Work.wait()` makes the then
//   current stream wait for it. async_op=False runs on the current stream. The host waits only in a barrier and in
//   `Work.wait(timeout)`.
// - The Work holds the storages of inputs and outputs until it is waited for, or until the host knows that it has
//   finished. Only send and recv call `record_stream`.
// - The future is complete immediately, on the stream: waiting for it makes a stream wait. It holds a list of tensors.
// - Collectives of one group run in the order in which they are issued. `send` and `recv` outside a batch run on a
//   stream for each pair of ranks, unless the group is bound to a device.
// - It rejects the dtypes, reductions, sizes and non-contiguous tensors that NCCL rejects, and names the tensor.
//
// Between processes gloo computes the sums, so they equal the CPU's bit for bit; between threads they are added in the
// order of ranks. As in gloo, an average is the sum divided by the size.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "deliveries.h"
#include "legs.h"
#include "torch_version.h"
#include "transport.h"
#include "work.h"

namespace sim {

using c10d::OpType;
using c10d::ReduceOp;
using c10d::Work;
using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

/// A collective that the program called, with its arguments checked.
struct Issue {
  std::string op;
  OpType type;
  bool async = true;
  std::vector<Argument> reads = {};
  std::vector<Argument> writes = {};
  std::vector<Leg> legs = {};
  Tensors results = {};                                    // the value of the Work and its future
  Tensors through = {};                                    // a list that NCCL moves through its own buffer
  std::optional<std::pair<int, int>> pair = std::nullopt;  // for a message on the stream of these two ranks
  int tag = 0;                                             // of a message
  std::string title = "";                                  // for profilers; `op` if empty
};

/// What the ranks of a group must agree about in one exchange of a collective.
struct Called {
  std::string op;                   // "all_reduce", "barrier", "send"
  std::string reduction;            // "SUM"; empty if data is only moved
  int root = -1;                    // for a message, the peer
  std::string dtype;                // "Float"
  int64_t numel = 0;                // of the part that all ranks have alike
  std::vector<int64_t> sends = {};  // for an all-to-all, to each rank
  std::vector<int64_t> takes = {};
  int device = 0;
  int tag = 0;             // of a message
  bool is_paired = false;  // a message on the stream of its two ranks
};
/// Called before an exchange starts, in the thread of the program. What it throws reaches the program.
using Watcher = std::function<void(const Called&)>;

struct SimOptions : c10d::Backend::Options {
  explicit SimOptions(milliseconds timeout) : c10d::Backend::Options("simccl", timeout) {}

  bool is_high_priority_stream = false;
};

class SimGroup : public c10d::Backend {
 public:
  /// `host`: the transport for CPU tensors, which also use this backend between ranks that are threads. Null if the
  /// group serves the device alone.
  SimGroup(
      std::shared_ptr<Transport> transport, std::shared_ptr<Transport> host, int rank, int size,
      const std::string& name, c10::intrusive_ptr<SimOptions> options);
  ~SimGroup() override;
  const std::string getBackendName() const override;

  // Which of these methods torch declares differs from version to version.

  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions();
  c10::intrusive_ptr<SimOptions> options() const;
  bool supportsSplitting() const;
  bool supportsCoalescing() const;
  void setTimeout(milliseconds timeout);
  /// From now on sends and receives run on the group's stream, as NCCL's do in a group bound to a device.
  void eagerConnectSingleDevice(at::Device);
  /// Whether they do.
  bool has_one_communicator() const;
  void abort();
  void abort_because(const std::string& reason);
  void shutdown();
  /// Show every exchange on the device to `watcher` from now on.
  void watch(Watcher watcher);
  /// The program asked for gloo, which all-reduces sparse tensors, unlike NCCL.
  void allow_sparse();
  bool allows_sparse() const;

#if SIM_TORCH_AT_LEAST(2, 9)
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
#endif

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  void startCoalescing();
  c10::intrusive_ptr<Work> endCoalescing();
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<Work> allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override;
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<Work> allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
#if SIM_TORCH_AT_LEAST(2, 14)
  c10::intrusive_ptr<Work> gather_single(
      at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
#endif
  c10::intrusive_ptr<Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;

  // Messages between two ranks are matched in order, as by NCCL, which ignores tags. The watcher sees them.

  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override;
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override;
  c10::intrusive_ptr<Work> recvAnysource(Tensors&, int) override;

  /// An all-reduce that the host waits for.
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override;

 private:
  struct Coalescing {
    std::shared_ptr<CollectiveCall> call = std::make_shared<CollectiveCall>();
    std::optional<c10::Stream> stream;
    Tensors tensors;
    bool async = false;
  };

  // Checks.

  c10::Device device_of(const Argument& argument) const;
  int checked_rank(int64_t rank, const char* what, const char* collective) const;
  void check_pairs(const Tensors& outputs, const Tensors& inputs, const char* collective) const;

  /// A number of every rank, for the host.
  std::vector<int64_t> counts_of_all(int64_t count) const;

  // Legs.

  Leg move_leg(Op op, const std::string& name, const Argument& argument) const;
  Leg reduction_leg(Op op, const std::string& name, const Argument& argument, const ReduceOp& reduce) const;
  Leg all_reduce(const std::vector<Argument>& arguments, const ReduceOp& reduce) const;
  Leg broadcast_leg(const Argument& argument, int root) const;
  Leg reduce_leg(at::Tensor from, at::Tensor to, const Argument& argument, int root, const ReduceOp& reduce) const;
  void add_all_gather(Issue& call, const Argument& to, const Argument& from) const;
  void add_reduce_scatter(Issue& call, const Argument& to, const Argument& from, const ReduceOp& reduce) const;

  // Issue.

  /// The group's stream on a device, or that of a pair of ranks for messages outside a batch.
  c10::Stream stream_of(c10::Device device, std::optional<std::pair<int, int>> pair = std::nullopt);
  c10::Device barrier_device(const c10d::BarrierOptions& opts);
  c10::intrusive_ptr<Work> point_to_point(Tensors& tensors, int peer, int tag, OpType type);

  /// Order the stream, note the accesses on it, start the exchanges. Null for a call on the current stream.
  c10::intrusive_ptr<Work> issue(Issue call, std::shared_ptr<CollectiveCall>* made = nullptr);

  /// All exchanges of a call have been started: on a stream, or for the host.
  void publish(
      const std::shared_ptr<CollectiveCall>& call, const std::optional<c10::Stream>& stream, const Tensors& held) const;

  /// The tensor through which NCCL moves a list of equal tensors: memory of the current stream.
  at::Tensor buffer_for(const Tensors& list) const;
  c10::Stream enter_stream(const Issue& call, c10::Device device);
  c10::intrusive_ptr<SimWork> make_work(
      std::shared_ptr<CollectiveCall> call, OpType type, const Tensors& inputs, Tensors results,
      std::optional<End> end) const;
  /// An event in torch's profilers, with the name that NCCL's or gloo's group gives it.
  void show_to_profiler(const std::string& op, const std::vector<Argument>& inputs) const;

  /// Release the tensors of those earlier collectives that the host knows to have run. As with NCCL, whatever
  /// collective comes next does so, a synchronous one too.
  void clear_shelves();
  /// The end of the work on a stream so far. The tensors are held until it is waited for, or until the host knows of
  /// it.
  End end_of(c10::Stream stream, const Tensors& held, const SitePtr& site);
  const std::shared_ptr<GroupState>& state_of(bool on_device) const;
  std::vector<std::shared_ptr<GroupState>> states() const;
  const std::shared_ptr<GroupState> on_device_;
  const std::shared_ptr<GroupState> on_host_;
  const c10::intrusive_ptr<SimOptions> options_;
  bool eager_ = false;
  bool sparse_ = false;
  std::shared_ptr<const Watcher> watcher_;
  std::atomic<uint64_t> num_collectives_{0};
  std::mutex mutex_;  // guards the next two: autograd's threads issue collectives too
  std::map<std::pair<c10::DeviceIndex, std::pair<int, int>>, c10::Stream> streams_;
  std::vector<std::shared_ptr<Shelf>> shelves_;
  std::optional<Coalescing> coalescing_;
};

}  // namespace sim
