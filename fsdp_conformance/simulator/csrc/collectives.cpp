#include "collectives.h"

#include <ATen/ATen.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "arguments.h"
#include "deliveries.h"
#include "runtime.h"
#include "transport.h"
#include "work.h"

#define SIM_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace sim {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using c10d::Work;
using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

constexpr const char* kOneDevice =
    "Expecting one tensor only but got multiple. You are probably using multiple devices under one thread, which "
    "neither "
    "ProcessGroupNCCL nor simccl supports.";

// Before torch 2.8 NCCL's collectives ran on the group's stream also with async_op=False, and c10d waited for them.
template <typename Options>
auto is_async(const Options& options, int) -> decltype(static_cast<bool>(options.asyncOp)) {
  return options.asyncOp || !SIM_TORCH_AT_LEAST(2, 8);
}
template <typename Options>
bool is_async(const Options&, long) {
  return true;
}
template <typename Options>
bool is_async(const Options& options) {
  return is_async(options, 0);
}

// Memory of the device, as CPU tensors over it.

/// The elements of a tensor in the order in which they lie, as one dimension.
at::Tensor raw(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {tensor.numel()}, at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor strided(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
}

/// Pieces of so many elements each, one after another.
Tensors pieces(const at::Tensor& tensor, const std::vector<int64_t>& numels) {
  Tensors result;
  auto* begin = static_cast<char*>(tensor.data_ptr());
  for (int64_t numel : numels) {
    result.push_back(at::from_blob(begin, {numel}, at::TensorOptions().dtype(tensor.scalar_type())));
    begin += numel * static_cast<int64_t>(tensor.itemsize());
  }
  return result;
}

Tensors equal_pieces(const at::Tensor& tensor, int count) {
  return pieces(tensor, std::vector<int64_t>(count, tensor.numel() / count));
}

/// The numbers of elements that belong to rows of the first dimension; no rows given: equal parts.
std::vector<int64_t> numels_of(const at::Tensor& tensor, const std::vector<int64_t>& rows, int size) {
  if (rows.empty()) {
    return std::vector<int64_t>(size, tensor.numel() / size);
  }
  std::vector<int64_t> numels;
  const int64_t row = tensor.dim() > 0 && tensor.size(0) > 0 ? tensor.numel() / tensor.size(0) : 0;
  for (int64_t count : rows) {
    numels.push_back(count * row);
  }
  return numels;
}

/// A copy of the elements of several places, one after another, as elements of `dtype`.
at::Tensor copy_of(const Tensors& places, at::ScalarType dtype) {
  int64_t nbytes = 0;
  for (const auto& place : places) {
    settle(place);
    nbytes += static_cast<int64_t>(place.nbytes());
  }
  auto copy = at::empty({nbytes / static_cast<int64_t>(c10::elementSize(dtype))}, at::TensorOptions().dtype(dtype));
  auto* to = static_cast<char*>(copy.data_ptr());
  for (const auto& place : places) {
    at::from_blob(to, place.sizes(), place.options()).copy_(place);
    to += place.nbytes();
  }
  return copy;
}

/// What needs no peer: a copy on the stream.
class LocalExchange : public Exchange {
 public:
  explicit LocalExchange(Tensors results) : results_(std::move(results)) {}
  bool done() override {
    return true;
  }
  bool wait(std::optional<Deadline>) override {
    return true;
  }
  Tensors results() override {
    return results_;
  }
  void abort(const std::string&) override {}

 private:
  const Tensors results_;
};

/// One exchange to come: from where and whereto.
struct Leg {
  Request request;
  std::vector<Tensors> give;  // places; those of one entry become one tensor of the request
  Tensors take;               // places
  bool local = false;         // what is given is taken, without the peers
  int64_t divisor = 1;
  at::Tensor factor;  // undefined: the scalar one
  double scalar_factor = 1;

  bool empty() const {
    const auto no_elements = [](const at::Tensor& place) { return place.numel() == 0; };
    return std::all_of(take.begin(), take.end(), no_elements) &&
           std::all_of(give.begin(), give.end(), [&](const Tensors& places) {
             return std::all_of(places.begin(), places.end(), no_elements);
           });
  }
};

/// A collective that the program has called, after its checks.
struct Issue {
  std::string op;
  OpType type;
  bool async = true;
  std::vector<Argument> reads = {};
  std::vector<Argument> writes = {};
  std::vector<Leg> legs = {};
  Tensors results = {};                                    // of the Work and its future
  Tensors through = {};                                    // a list that NCCL moves through one buffer of its own
  std::optional<std::pair<int, int>> pair = std::nullopt;  // a message between these ranks, on a stream of theirs
};

struct SimOptions : c10d::Backend::Options {
  explicit SimOptions(milliseconds timeout) : c10d::Backend::Options("simccl", timeout) {}

  bool is_high_priority_stream = false;
};

class SimGroup : public c10d::Backend {
 public:
  /// `host`: the transport of tensors on the CPU, which ranks that are threads put through the same backend. Null: it
  /// serves the device alone.
  SimGroup(
      std::shared_ptr<Transport> transport, std::shared_ptr<Transport> host, int rank, int size,
      const std::string& name, c10::intrusive_ptr<SimOptions> options)
      : c10d::Backend(rank, size),
        on_device_(std::make_shared<GroupState>(name, rank, std::move(transport))),
        on_host_(host ? std::make_shared<GroupState>(name, rank, std::move(host)) : nullptr),
        options_(std::move(options)) {
    init();
  }

  ~SimGroup() override {
    for (const auto& shelf : shelves_) {
      shelf->leave();
    }
  }

  const std::string getBackendName() const override {
    return "simccl";
  }

  // Which of these there are to override differs from version to version.

  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() {
    return options_;
  }
  c10::intrusive_ptr<SimOptions> options() const {
    return options_;
  }
  bool supportsSplitting() const {
    return SIM_TORCH_AT_LEAST(2, 9);
  }
  bool supportsCoalescing() const {
    return true;
  }
  void setTimeout(milliseconds timeout) {
    options_->timeout = timeout;
    for (const auto& state : states()) {
      state->transport->set_timeout(timeout);
    }
  }
  /// From now on sends and receives run on the group's stream, as NCCL's do in a group that is bound to a device.
  void eagerConnectSingleDevice(at::Device) {
    eager_ = true;
  }
  void abort() {
    WithoutGil released;
    for (const auto& state : states()) {
      state->abort(c10::str("group ", state->name, " was aborted on rank ", rank_));
    }
  }
  void shutdown() {
    WithoutGil released;
    for (const auto& state : states()) {
      state->drain();
    }
  }

#if SIM_TORCH_AT_LEAST(2, 9)
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override {
    const auto place = std::find(ranks.begin(), ranks.end(), rank_);
    if (place == ranks.end()) {
      return nullptr;
    }
    auto options = c10::make_intrusive<SimOptions>(opts->timeout);
    options->is_high_priority_stream = options_->is_high_priority_stream;
    options->group_name = opts->group_name;
    options->global_ranks_in_group = opts->global_ranks_in_group;
    WithoutGil released;
    const auto split_off = [&](const std::shared_ptr<GroupState>& state) {
      return state ? state->transport->split(store, ranks, opts->group_name, opts->timeout) : nullptr;
    };
    auto part = c10::make_intrusive<SimGroup>(
        split_off(on_device_), split_off(on_host_), static_cast<int>(place - ranks.begin()),
        static_cast<int>(ranks.size()), opts->group_name, std::move(options));
    part->eager_ = eager_;
    return part;
  }
#endif

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return num_collectives_;
  }

  void startCoalescing() {
    coalescing_.emplace();
  }

  c10::intrusive_ptr<Work> endCoalescing() {
    TORCH_CHECK(coalescing_, "end_coalescing without start_coalescing");
    Coalescing coalesced = std::move(*coalescing_);
    coalescing_.reset();
    if (coalesced.tensors.empty()) {
      return nullptr;  // Nothing was called in between.
    }
    const auto& stream = coalesced.stream;
    publish(coalesced.call, stream, coalesced.tensors);
    auto work = make_work(
        coalesced.call, OpType::COALESCED, "coalesced", coalesced.tensors, {},
        stream ? std::make_optional(end_of(*stream, coalesced.tensors)) : std::nullopt);
    if (stream) {
      work->complete_future();
    }
    return coalesced.async || !stream ? work : nullptr;
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    TORCH_CHECK(tensors.size() == 1, kOneDevice);
    const Argument tensor{as_real(tensors[0], opts.reduceOp, "all_reduce"), "tensor"};
    check_contiguous(tensor, device_of(tensor));
    return issue(
        {.op = "all_reduce",
         .type = OpType::ALLREDUCE,
         .async = is_async(opts),
         .reads = {tensor},
         .writes = {tensor},
         .legs = {all_reduce({tensor}, opts.reduceOp)},
         .results = {tensors[0]}});
  }

  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    TORCH_CHECK_WITH(ValueError, !tensors.empty(), "Tensor list must be nonempty [all_reduce_coalesced]");
    auto arguments = named(tensors, "tensors");
    for (auto& argument : arguments) {
      argument.tensor = as_real(argument.tensor, opts.reduceOp, "all_reduce_coalesced");
      check_contiguous(argument, device_of(arguments[0]));
    }
    Issue call{
        .op = "all_reduce_coalesced",
        .type = OpType::COALESCED,
        .async = is_async(opts),
        .reads = arguments,
        .writes = arguments};
    call.results = tensors;
    const bool one_dtype = std::all_of(arguments.begin(), arguments.end(), [&](const Argument& argument) {
      return argument.tensor.scalar_type() == arguments[0].tensor.scalar_type();
    });
    if (one_dtype) {
      call.legs.push_back(all_reduce(arguments, opts.reduceOp));
    } else {
      for (const auto& argument : arguments) {
        call.legs.push_back(all_reduce({argument}, opts.reduceOp));
      }
    }
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override {
    TORCH_CHECK(
        false, "neither NCCL nor simccl supports all_reduce with sparse tensors. Please use dense tensors instead.");
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    TORCH_CHECK(tensors.size() == 1, kOneDevice);
    const Argument tensor{as_real(tensors[0]), "tensor"};
    check_contiguous(tensor, device_of(tensor));
    const int root = checked_rank(opts.rootRank + opts.rootTensor, "root", "broadcast");
    Issue call{
        .op = "broadcast", .type = OpType::BROADCAST, .async = is_async(opts), .legs = {broadcast_leg(tensor, root)}};
    (rank_ == root ? call.reads : call.writes).push_back(tensor);
    call.results = {tensors[0]};
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    TORCH_CHECK(tensors.size() == 1, kOneDevice);
    const Argument tensor{as_real(tensors[0], opts.reduceOp, "reduce"), "tensor"};
    check_contiguous(tensor, device_of(tensor));
    const int root = checked_rank(opts.rootRank + opts.rootTensor, "root", "reduce");
    Issue call{.op = "reduce", .type = OpType::REDUCE, .async = is_async(opts), .reads = {tensor}};
    call.legs.push_back(reduce_leg(raw(tensor.tensor), raw(tensor.tensor), tensor, root, opts.reduceOp));
    if (rank_ == root) {
      call.writes.push_back(tensor);
    }
    call.results = {tensors[0]};
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    TORCH_CHECK(inputs.size() == 1 && outputs.size() == 1, kOneDevice);
    const Argument input{inputs[0], "input tensor"};
    const auto device = device_of(input);
    check_contiguous(input, device);
    check_dtype(input);
    const auto& list = outputs[0];
    check_length(list, size_, "tensor_list", "all_gather");
    Issue call{
        .op = "all_gather",
        .type = OpType::ALLGATHER,
        .async = is_async(opts),
        .reads = {input},
        .writes = named(list, "tensor_list")};
    for (const auto& output : call.writes) {
      check_dense(output, device);
      check_same_dtype(output, input);
    }
    check_numel(input, list[rank_].numel(), "as the tensor of tensor_list that belongs to this rank");
    if (same_sizes(list)) {
      auto leg = move_leg(Op::AllGather, call.op, input);
      leg.give = {{raw(input.tensor)}};
      for (const auto& output : list) {
        leg.take.push_back(strided(output));  // NCCL copies there from a buffer of its own, whatever the strides.
      }
      call.legs.push_back(std::move(leg));
      call.through = list;
    } else {
      for (int rank = 0; rank < size_; ++rank) {
        check_contiguous(call.writes[rank], device);
        call.legs.push_back(broadcast_leg(rank == rank_ ? input : call.writes[rank], rank));
      }
      Leg own;
      own.local = true;
      own.give = {{raw(input.tensor)}};
      own.take = {raw(list[rank_])};
      call.legs.push_back(std::move(own));
    }
    call.results = list;
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    Issue call{.op = "all_gather_into_tensor", .type = OpType::_ALLGATHER_BASE, .async = is_async(opts)};
    add_all_gather(call, {output, "output tensor"}, {input, "input tensor"});
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    check_pairs(outputs, inputs, "all_gather_into_tensor_coalesced");
    Issue call{.op = "all_gather_into_tensor_coalesced", .type = OpType::COALESCED, .async = is_async(opts)};
    const auto to = named(outputs, "outputs");
    const auto from = named(inputs, "inputs");
    for (size_t i = 0; i < to.size(); ++i) {
      add_all_gather(call, to[i], from[i]);
    }
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> allgather_coalesced(
      std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override {
    C10_THROW_ERROR(NotImplementedError, "ProcessGroupNCCL does not support allgather_coalesced, nor does simccl");
  }

  c10::intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, kOneDevice);
    const Argument output{outputs[0], "output tensor"};
    const auto device = device_of(output);
    check_contiguous(output, device);
    const auto& list = inputs[0];
    check_length(list, size_, "input_list", "reduce_scatter");
    Issue call{
        .op = "reduce_scatter",
        .type = OpType::REDUCE_SCATTER,
        .async = is_async(opts),
        .reads = named(list, "input_list"),
        .writes = {output}};
    for (const auto& input : call.reads) {
      check_dense(input, device);
      check_same_dtype(output, input);
    }
    check_numel(output, list[rank_].numel(), "as the tensor of input_list that belongs to this rank");
    if (same_sizes(list)) {
      auto leg = reduction_leg(Op::ReduceScatter, call.op, output, opts.reduceOp);
      leg.request.list = true;
      leg.give.emplace_back();
      for (const auto& input : list) {
        leg.give[0].push_back(strided(input));
      }
      leg.take = {raw(output.tensor)};
      call.legs.push_back(std::move(leg));
      call.through = list;
    } else {
      for (int rank = 0; rank < size_; ++rank) {
        check_contiguous(call.reads[rank], device);
        call.legs.push_back(reduce_leg(raw(list[rank]), raw(output.tensor), call.reads[rank], rank, opts.reduceOp));
      }
    }
    call.results = {output.tensor};
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    Issue call{.op = "reduce_scatter_tensor", .type = OpType::_REDUCE_SCATTER_BASE, .async = is_async(opts)};
    add_reduce_scatter(call, {output, "output tensor"}, {input, "input tensor"}, opts.reduceOp);
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    check_pairs(outputs, inputs, "reduce_scatter_tensor_coalesced");
    Issue call{.op = "reduce_scatter_tensor_coalesced", .type = OpType::COALESCED, .async = is_async(opts)};
    const auto to = named(outputs, "outputs");
    const auto from = named(inputs, "inputs");
    for (size_t i = 0; i < to.size(); ++i) {
      add_reduce_scatter(call, to[i], from[i], opts.reduceOp);
    }
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override {
    const Argument to{output, "output tensor"};
    const Argument from{input, "input tensor"};
    const auto device = device_of(to);
    check_contiguous(to, device);
    check_contiguous(from, device);
    check_dtype(from);
    check_same_dtype(to, from);
    c10d::checkSplitSizes(input_splits, input, size_);
    c10d::checkSplitSizes(output_splits, output, size_);
    Issue call{
        .op = "all_to_all_single",
        .type = OpType::ALLTOALL_BASE,
        .async = is_async(opts),
        .reads = {from},
        .writes = {to}};
    auto leg = move_leg(Op::AllToAll, call.op, from);
    for (auto& piece : pieces(input, numels_of(input, input_splits, size_))) {
      leg.give.push_back({std::move(piece)});
    }
    leg.take = pieces(output, numels_of(output, output_splits, size_));
    call.legs.push_back(std::move(leg));
    call.results = {output};
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    check_length(outputs, size_, "output_tensor_list", "all_to_all");
    check_length(inputs, size_, "input_tensor_list", "all_to_all");
    Issue call{
        .op = "all_to_all",
        .type = OpType::ALLTOALL,
        .async = is_async(opts),
        .reads = named(inputs, "input_tensor_list"),
        .writes = named(outputs, "output_tensor_list")};
    const auto device = device_of(call.writes[0]);
    auto leg = move_leg(Op::AllToAll, call.op, call.reads[0]);
    for (int rank = 0; rank < size_; ++rank) {
      check_contiguous(call.writes[rank], device);
      check_contiguous(call.reads[rank], device);
      check_dtype(call.reads[rank]);
      check_same_dtype(call.reads[rank], call.reads[0]);
      check_same_dtype(call.writes[rank], call.reads[0]);
      leg.give.push_back({raw(inputs[rank])});
      leg.take.push_back(raw(outputs[rank]));
    }
    call.legs.push_back(std::move(leg));
    call.results = outputs;
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    TORCH_CHECK(inputs.size() == 1, kOneDevice);
    const Argument input{inputs[0], "input tensor"};
    const int root = checked_rank(opts.rootRank, "root", "gather");
    const auto device = device_of(input);
    check_contiguous(input, device);
    check_dtype(input);
    Issue call{.op = "gather", .type = OpType::GATHER, .async = is_async(opts), .reads = {input}};
    auto leg = move_leg(Op::Gather, call.op, input);
    leg.request.root = root;
    leg.give = {{raw(input.tensor)}};
    if (rank_ == root) {
      TORCH_CHECK_WITH(
          ValueError, outputs.size() == 1, "requires a single-element output list containing a list [gather]");
      check_length(outputs[0], size_, "gather_list", "gather");
      call.writes = named(outputs[0], "gather_list");
      for (const auto& output : call.writes) {
        check_contiguous(output, device);
        check_same_dtype(output, input);
        check_same_sizes(output, input);
        leg.take.push_back(raw(output.tensor));
      }
      call.results = outputs[0];
    } else {
      TORCH_CHECK_WITH(ValueError, outputs.empty(), "requires empty output on non-root [gather]");
    }
    call.legs.push_back(std::move(leg));
    return issue(std::move(call));
  }

  c10::intrusive_ptr<Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    TORCH_CHECK(outputs.size() == 1, kOneDevice);
    const Argument output{outputs[0], "output tensor"};
    const int root = checked_rank(opts.rootRank, "root", "scatter");
    const auto device = device_of(output);
    check_contiguous(output, device);
    check_dtype(output);
    Issue call{.op = "scatter", .type = OpType::SCATTER, .async = is_async(opts), .writes = {output}};
    auto leg = move_leg(Op::Scatter, call.op, output);
    leg.request.root = root;
    leg.take = {raw(output.tensor)};
    if (rank_ == root) {
      TORCH_CHECK_WITH(
          ValueError, inputs.size() == 1, "requires a single-element input list containing a list [scatter]");
      check_length(inputs[0], size_, "scatter_list", "scatter");
      call.reads = named(inputs[0], "scatter_list");
      for (const auto& input : call.reads) {
        check_contiguous(input, device);
        check_same_dtype(input, output);
        check_same_sizes(input, output);
        leg.give.push_back({raw(input.tensor)});
      }
    } else {
      TORCH_CHECK_WITH(ValueError, inputs.empty(), "requires empty input on non-root [scatter]");
    }
    call.legs.push_back(std::move(leg));
    call.results = {output.tensor};
    return issue(std::move(call));
  }

  // Tags are not looked at: messages between two ranks are matched in order, as by NCCL.

  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int /*tag*/) override {
    return point_to_point(tensors, to, OpType::SEND);
  }

  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int /*tag*/) override {
    return point_to_point(tensors, from, OpType::RECV);
  }

  c10::intrusive_ptr<Work> recvAnysource(Tensors&, int) override {
    C10_THROW_ERROR(NotImplementedError, "ProcessGroupNCCL does not support recvAnysource, nor does simccl");
  }

  /// An all-reduce that the host waits for.
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override {
    Argument tensor{{}, "barrier's own tensor"};
    {
      PlainKernels plain;
      tensor.tensor = at::zeros({1}, at::TensorOptions().device(barrier_device(opts)).dtype(at::kFloat));
    }
    Issue call{
        .op = "barrier", .type = OpType::BARRIER, .async = is_async(opts), .reads = {tensor}, .writes = {tensor}};
    call.legs.push_back(all_reduce({tensor}, ReduceOp::SUM));
    call.legs[0].request.call = "barrier()";
    std::shared_ptr<CollectiveCall> made;
    auto work = issue(std::move(call), &made);
    if (work) {
      static_cast<SimWork*>(work.get())->set_barrier();
      return work;
    }
    {
      WithoutGil released;
      made->finish(std::nullopt);
    }
    host_waits_stream(current_stream(tensor.tensor.device().index()));
    return nullptr;
  }

 private:
  struct Coalescing {
    std::shared_ptr<CollectiveCall> call = std::make_shared<CollectiveCall>();
    std::optional<c10::Stream> stream;
    Tensors tensors;
    bool async = false;
  };

  // Checks.

  c10::Device device_of(const Argument& argument) const {
    const bool host = on_host_ && argument.tensor.defined() && argument.tensor.device().is_cpu();
    check_device(argument, host ? c10::DeviceType::CPU : kSim);
    return argument.tensor.device();
  }

  int checked_rank(int64_t rank, const char* what, const char* collective) const {
    check_rank(static_cast<int>(rank), size_, what, collective);
    return static_cast<int>(rank);
  }

  void check_pairs(const Tensors& outputs, const Tensors& inputs, const char* collective) const {
    TORCH_CHECK_WITH(
        ValueError, !inputs.empty() && outputs.size() == inputs.size(), "len(outputs)=", outputs.size(),
        ", len(inputs)=", inputs.size(), ", but should be equal and not 0 [", collective, "]");
  }

  // Legs.

  Leg move_leg(Op op, const std::string& name, const Argument& argument) const {
    Leg leg;
    leg.request.op = op;
    leg.request.call = c10::str(name, "(", argument.tensor.numel(), " ", argument.tensor.scalar_type(), ")");
    return leg;
  }

  Leg reduction_leg(Op op, const std::string& name, const Argument& argument, const ReduceOp& reduce) const {
    const auto reduction = reduction_of(reduce, argument, size_);
    Leg leg;
    leg.request.op = op;
    leg.request.dtype = reduction.dtype;
    leg.request.reduce = reduction.op;
    leg.request.call =
        c10::str(name, "(", reduction.name, ", ", argument.tensor.numel(), " ", argument.tensor.scalar_type(), ")");
    leg.divisor = reduction.divisor;
    leg.factor = reduction.factor;
    leg.scalar_factor = reduction.scalar_factor;
    return leg;
  }

  Leg all_reduce(const std::vector<Argument>& arguments, const ReduceOp& reduce) const {
    auto leg = reduction_leg(Op::AllReduce, "all_reduce", arguments[0], reduce);
    for (const auto& argument : arguments) {
      leg.give.push_back({raw(argument.tensor)});
      leg.take.push_back(raw(argument.tensor));
    }
    return leg;
  }

  Leg broadcast_leg(const Argument& argument, int root) const {
    check_dtype(argument);
    auto leg = move_leg(Op::Broadcast, "broadcast", argument);
    leg.request.root = root;
    if (rank_ == root) {
      leg.give = {{raw(argument.tensor)}};
    } else {
      leg.take = {raw(argument.tensor)};
    }
    return leg;
  }

  Leg reduce_leg(at::Tensor from, at::Tensor to, const Argument& argument, int root, const ReduceOp& reduce) const {
    auto leg = reduction_leg(Op::Reduce, "reduce", argument, reduce);
    leg.request.root = root;
    leg.give = {{std::move(from)}};
    if (rank_ == root) {
      leg.take = {std::move(to)};
    }
    return leg;
  }

  void add_all_gather(Issue& call, const Argument& to, const Argument& from) const {
    const auto device = device_of(from);
    check_contiguous(from, device);
    check_contiguous(to, device);
    check_dtype(from);
    check_same_dtype(to, from);
    check_numel(
        to, from.tensor.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
    auto leg = move_leg(Op::AllGather, call.op, from);
    leg.give = {{raw(from.tensor)}};
    leg.take = equal_pieces(to.tensor, size_);
    call.reads.push_back(from);
    call.writes.push_back(to);
    call.legs.push_back(std::move(leg));
    call.results.push_back(to.tensor);
  }

  void add_reduce_scatter(Issue& call, const Argument& to, const Argument& from, const ReduceOp& reduce) const {
    const auto device = device_of(from);
    check_contiguous(from, device);
    check_contiguous(to, device);
    check_same_dtype(to, from);
    check_numel(from, to.tensor.numel() * size_, "input tensor must be the same size as output size times world size");
    auto leg = reduction_leg(Op::ReduceScatter, call.op, from, reduce);
    leg.give = {{raw(from.tensor)}};
    leg.take = {raw(to.tensor)};
    call.reads.push_back(from);
    call.writes.push_back(to);
    call.legs.push_back(std::move(leg));
    call.results.push_back(to.tensor);
  }

  // Issue.

  /// The stream of this group on a device; of a pair of ranks for messages outside of a batch.
  c10::Stream stream_of(c10::Device device, std::optional<std::pair<int, int>> pair = std::nullopt) {
    const auto key = std::make_pair(device.index(), pair.value_or(std::make_pair(-1, -1)));
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = streams_.find(key);
    if (found == streams_.end()) {
      const auto stream = new_stream(device.index(), options_->is_high_priority_stream ? -1 : 0);
      found = streams_.emplace(key, stream).first;
      Checker::get().rename_lane(
          lane_of(stream), pair ? c10::str("ranks ", pair->first, " and ", pair->second, " of group ", on_device_->name)
                                : c10::str("group ", on_device_->name));
    }
    return found->second;
  }

  c10::Device barrier_device(const c10d::BarrierOptions& opts) {
    if (!opts.device_ids.empty()) {
      return c10::Device(kSim, static_cast<c10::DeviceIndex>(opts.device_ids[0]));
    }
    if (const auto bound = getBoundDeviceId()) {
      return *bound;
    }
    if (on_host_) {
      return c10::Device(c10::DeviceType::CPU);  // Which of both is meant is not said; torch prefers the CPU.
    }
    std::lock_guard<std::mutex> lock(mutex_);
    return c10::Device(kSim, streams_.empty() ? current_device() : streams_.begin()->first.first);
  }

  c10::intrusive_ptr<Work> point_to_point(Tensors& tensors, int peer, OpType type) {
    TORCH_CHECK(tensors.size() == 1, kOneDevice);
    const bool sends = type == OpType::SEND;
    const Argument tensor{tensors[0], "tensor"};
    device_of(tensor);
    check_rank(peer, size_, "peer", sends ? "send" : "recv");
    check_dtype(tensor);
    TORCH_CHECK_WITH(
        ValueError, tensor.tensor.is_non_overlapping_and_dense(), "Tensors must be dense, but got the ",
        describe(tensor), ". NCCL transfers as many elements as it has from where it begins.");
    Issue call{.op = sends ? "send" : "recv", .type = type};
    auto leg = move_leg(sends ? Op::Send : Op::Recv, call.op, tensor);
    leg.request.call += c10::str(sends ? " to rank " : " from rank ", peer);
    leg.request.root = peer;
    if (sends) {
      call.reads = {tensor};
      leg.give = {{raw(tensor.tensor)}};
    } else {
      call.writes = {tensor};
      leg.take = {raw(tensor.tensor)};
    }
    call.legs.push_back(std::move(leg));
    call.results = tensors;
    if (!coalescing_ && !eager_) {
      call.pair = std::make_pair(std::min(rank_, peer), std::max(rank_, peer));
    }
    return issue(std::move(call));
  }

  /// What the accesses of a call have shown.
  struct Noted {
    bool reads_poisoned = false;
    bool writes_poisoned = false;
  };

  /// Order the stream, note the accesses on it, start the exchanges. Null for a call that is on the current stream.
  c10::intrusive_ptr<Work> issue(Issue call, std::shared_ptr<CollectiveCall>* made = nullptr) {
    Tensors held;
    for (const auto* arguments : {&call.reads, &call.writes}) {
      for (const auto& argument : *arguments) {
        held.push_back(argument.tensor);
      }
    }
    std::optional<c10::Stream> stream;
    Noted noted;
    if (held[0].device().type() == kSim) {
      const SitePtr site = checking() ? here(call.op) : nullptr;
      Operation running(&site);
      if (!call.through.empty()) {
        held.push_back(buffer_for(call.through));
        call.writes.push_back({held.back(), "simccl's own buffer"});
      }
      stream = enter_stream(call, held[0].device());
      Checker::get().submit(lane_of(*stream));
      if (site) {
        noted = note(call, *stream, site);
      }
    }
    if (!coalescing_) {
      ++num_collectives_;
    }
    auto target = coalescing_ ? coalescing_->call : std::make_shared<CollectiveCall>();
    for (auto& leg : call.legs) {
      if (!leg.empty() ||
          leg.request.op == Op::AllToAll) {  // The peers may exchange something where this rank does not.
        target->add(start(std::move(leg), noted, *state_of(stream.has_value())));
      }
    }
    if (made) {
      *made = target;
    }
    if (coalescing_) {
      coalescing_->stream = stream;
      coalescing_->async = call.async;
      coalescing_->tensors.insert(coalescing_->tensors.end(), held.begin(), held.end());
      if (is_message(call.type) || !call.async || !stream) {
        return nullptr;
      }
      // Waiting for this one waits for nothing: only the end of all is recorded.
      const End nothing{*stream, {}, std::make_shared<Shelf>(Tensors{}, Clock{})};
      return make_work(target, call.type, call.op, held, std::move(call.results), nothing);
    }
    publish(target, stream, held);
    if (stream && !call.async) {
      return nullptr;
    }
    auto work = make_work(
        target, call.type, call.op, held, std::move(call.results),
        stream ? std::make_optional(end_of(*stream, is_message(call.type) ? Tensors{} : held)) : std::nullopt);
    if (stream) {
      work->complete_future();
    }
    return work;
  }

  /// All of a call has been started: on a stream, or for the host.
  void publish(
      const std::shared_ptr<CollectiveCall>& call, const std::optional<c10::Stream>& stream,
      const Tensors& held) const {
    if (stream) {
      const Lane lane = lane_of(*stream);
      const Clock clock = Checker::get().snapshot(lane);
      // A stream whose operations have all gone unchecked has no clock of its own yet.
      const uint64_t tick = static_cast<size_t>(lane) < clock.size() ? clock[lane] : 0;
      call->publish(stream->device_index(), lane, tick);
    } else {
      call->hold(held);
    }
    state_of(stream.has_value())->started(call);
  }

  static bool is_message(OpType type) {
    return type == OpType::SEND || type == OpType::RECV;
  }

  /// NCCL moves a list of equal tensors through one tensor, which counts as memory of the current stream.
  at::Tensor buffer_for(const Tensors& list) const {
    PlainKernels plain;
    std::vector<int64_t> sizes = {size_};
    sizes.insert(sizes.end(), list[0].sizes().begin(), list[0].sizes().end());
    return at::empty(sizes, at::TensorOptions().device(list[0].device()).dtype(list[0].scalar_type()));
  }

  c10::Stream enter_stream(const Issue& call, c10::Device device) {
    const auto current = current_stream(device.index());
    const auto stream = call.async ? stream_of(device, call.pair) : current;
    if (stream != current) {
      stream_waits(stream, Checker::get().snapshot(lane_of(current)), Wait::CollectiveIssue);
    }
    if (is_message(call.type)) {
      // The one place where NCCL still does so: nobody need wait for an isend.
      const auto& tensor = (call.reads.empty() ? call.writes : call.reads)[0].tensor;
      record_stream(tensor.storage().data_ptr(), stream);
    }
    return stream;
  }

  static Noted note(const Issue& call, c10::Stream stream, const SitePtr& site) {
    Noted noted;
    for (const auto& argument : call.reads) {
      noted.reads_poisoned |= note_access(argument.tensor, Kind::Read, stream, site);
    }
    for (const auto& leg : call.legs) {
      if (leg.factor.defined() && leg.factor.device().type() == kSim) {
        noted.reads_poisoned |= note_access(leg.factor, Kind::Read, stream, site);
      }
    }
    for (const auto& argument : call.writes) {
      noted.writes_poisoned |= note_access(argument.tensor, Kind::Write, stream, site);
    }
    return noted;
  }

  Part start(Leg leg, const Noted& noted, const GroupState& state) const {
    PlainKernels plain;
    auto& request = leg.request;
    for (const auto& places : leg.give) {
      auto given = copy_of(places, request.dtype);
      if (leg.factor.defined()) {
        settle(leg.factor);
        given.mul_(strided(leg.factor));
      } else if (leg.scalar_factor != 1) {
        given.mul_(leg.scalar_factor);
      }
      if (noted.reads_poisoned) {
        std::memset(given.data_ptr(), 0xFF, given.nbytes());
      }
      request.give.push_back(std::move(given));
    }
    Part part;
    for (auto& place : leg.take) {
      settle(place);  // What an earlier collective owes to it comes first.
      request.take.push_back(static_cast<int64_t>(place.nbytes() / c10::elementSize(request.dtype)));
      part.targets.push_back(std::make_unique<Target>(std::move(place)));
      part.targets.back()->poisoned = noted.writes_poisoned;
    }
    part.divisor = leg.divisor;
    if (leg.local) {
      part.exchange = std::make_shared<LocalExchange>(std::move(request.give));
    } else {
      WithoutGil released;
      part.exchange = state.transport->start(std::move(request));
    }
    return part;
  }

  c10::intrusive_ptr<SimWork> make_work(
      std::shared_ptr<CollectiveCall> call, OpType type, const std::string& op, const Tensors& inputs, Tensors results,
      std::optional<End> end) const {
    return c10::make_intrusive<SimWork>(
        state_of(end.has_value()), std::move(call), type, num_collectives_, "simccl:" + op, inputs, std::move(results),
        std::move(end));
  }

  /// The end of what has been put on a stream. Tensors are held until somebody waits for it, or the host knows of it.
  End end_of(c10::Stream stream, const Tensors& held) {
    auto clock = Checker::get().snapshot(lane_of(stream));
    auto shelf = std::make_shared<Shelf>(held, clock);
    std::vector<std::shared_ptr<Shelf>> shelves;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      shelves = std::exchange(shelves_, {});
    }
    const auto cleared = [](const auto& earlier) { return earlier->clear_if_host_knows(); };
    shelves.erase(std::remove_if(shelves.begin(), shelves.end(), cleared), shelves.end());
    shelves.push_back(shelf);
    std::lock_guard<std::mutex> lock(mutex_);
    shelves_.insert(shelves_.end(), shelves.begin(), shelves.end());
    return {stream, std::move(clock), std::move(shelf)};
  }

  const std::shared_ptr<GroupState>& state_of(bool on_device) const {
    return on_device ? on_device_ : on_host_;
  }

  std::vector<std::shared_ptr<GroupState>> states() const {
    return on_host_ ? std::vector{on_device_, on_host_} : std::vector{on_device_};
  }

  const std::shared_ptr<GroupState> on_device_;
  const std::shared_ptr<GroupState> on_host_;
  const c10::intrusive_ptr<SimOptions> options_;
  bool eager_ = false;
  std::atomic<uint64_t> num_collectives_{0};
  std::mutex mutex_;  // of the two below: autograd's threads issue collectives as well
  std::map<std::pair<c10::DeviceIndex, std::pair<int, int>>, c10::Stream> streams_;
  std::vector<std::shared_ptr<Shelf>> shelves_;
  std::optional<Coalescing> coalescing_;
};

milliseconds in_milliseconds(double seconds) {
  return milliseconds(static_cast<int64_t>(seconds * 1000));
}

c10::intrusive_ptr<SimOptions> options_for(double timeout_s, bool high_priority) {
  auto options = c10::make_intrusive<SimOptions>(in_milliseconds(timeout_s));
  options->is_high_priority_stream = high_priority;
  return options;
}

/// A function of Python, which is called and destroyed with the interpreter's lock.
MakeGloo make_gloo(pybind11::function function) {
  const std::shared_ptr<pybind11::function> held(
      new pybind11::function(std::move(function)), [](pybind11::function* gone) {
        pybind11::gil_scoped_acquire gil;
        delete gone;
      });
  return [held](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout) {
    pybind11::gil_scoped_acquire gil;
    return (*held)(store, rank, size, timeout).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
}

c10::intrusive_ptr<c10d::Backend> group_over_gloo(
    pybind11::function gloo, const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, int size,
    double timeout_s, bool high_priority) {
  auto options = options_for(timeout_s, high_priority);
  auto transport = gloo_transport(make_gloo(std::move(gloo)), store, rank, size, options->timeout);
  return c10::make_intrusive<SimGroup>(std::move(transport), nullptr, rank, size, name, std::move(options));
}

c10::intrusive_ptr<c10d::Backend> group_of_threads(
    const std::string& world, const std::string& name, int rank, int size, double timeout_s, bool high_priority) {
  const auto options = options_for(timeout_s, high_priority);
  const auto transport = [&](const std::string& unique_name) {
    return thread_transport(world, unique_name, rank, size, options->timeout);
  };
  return c10::make_intrusive<SimGroup>(transport(name), transport(name + " on the CPU"), rank, size, name, options);
}

/// A Python function of two functions; what it raises becomes a failure of the backend.
Waiter waiter_of(pybind11::function function) {
  namespace py = pybind11;
  // Given up with the GIL held, whoever drops the last copy.
  std::shared_ptr<py::function> kept(new py::function(std::move(function)), [](py::function* held) {
    py::gil_scoped_acquire gil;
    delete held;
  });
  return [kept](const std::function<bool()>& ready, const std::function<std::string()>& describe) {
    std::string failure;
    {
      py::gil_scoped_acquire gil;
      try {
        (*kept)(py::cpp_function(ready), py::cpp_function(describe));
      } catch (py::error_already_set& error) {
        failure = py::str(error.value()).cast<std::string>();
      }
    }
    if (!failure.empty()) {
      C10_THROW_ERROR(DistBackendError, failure);
    }
  };
}

}  // namespace

void register_collectives(pybind11::module_& module) {
  namespace py = pybind11;
  py::module_::import("torch.distributed");  // The base classes are registered there.
  py::class_<SimOptions, c10d::Backend::Options, c10::intrusive_ptr<SimOptions>>(module, "ProcessGroupOptions")
      .def(
          py::init([](double timeout_s) { return c10::make_intrusive<SimOptions>(in_milliseconds(timeout_s)); }),
          py::arg("timeout_s"))
      .def_readwrite("is_high_priority_stream", &SimOptions::is_high_priority_stream)
      .def("__copy__", [](const SimOptions& self) { return c10::make_intrusive<SimOptions>(self); })
      .def("__deepcopy__", [](const SimOptions& self, const py::dict&) {
        return c10::make_intrusive<SimOptions>(self);
      });
  // With the base's methods, and those that c10d knows only of torch's own backends.
  py::class_<SimGroup, c10d::Backend, c10::intrusive_ptr<SimGroup>>(module, "ProcessGroup")
      .def_property_readonly("options", &SimGroup::options)
      .def("_set_default_timeout", &SimGroup::setTimeout, py::arg("timeout"));
  module.def(
      "group_over_gloo", &group_over_gloo, py::arg("gloo"), py::arg("store"), py::arg("name"), py::arg("rank"),
      py::arg("size"), py::arg("timeout_s"), py::arg("high_priority"));
  module.def(
      "group_of_threads", &group_of_threads, py::arg("world"), py::arg("name"), py::arg("rank"), py::arg("size"),
      py::arg("timeout_s"), py::arg("high_priority"));
  module.def(
      "abort_thread_world", &abort_thread_world, py::arg("world"), py::arg("reason"),
      py::call_guard<py::gil_scoped_release>());
  module.def("set_thread_waiter", [](std::optional<py::function> waiter) {
    set_thread_waiter(waiter ? waiter_of(std::move(*waiter)) : Waiter());
  });
  module.def("forget_thread_world", &forget_thread_world, py::arg("world"), py::call_guard<py::gil_scoped_release>());
  module.def("deliveries_pending", &deliveries_pending);
}

}  // namespace sim
