// The group's collectives: each checks its arguments as ProcessGroupNCCL does, and describes what it exchanges.
#include "group.h"

#include <algorithm>

#include "arguments.h"
#include "gpu_trace.h"
#include "runtime.h"

namespace sim {
namespace {

constexpr const char* kOneDevice =
    "Expecting one tensor only but got multiple. You are probably using multiple devices under one thread, which "
    "neither ProcessGroupNCCL nor simccl supports.";

// Before torch 2.8 NCCL's collectives ran on the group's stream even with async_op=False, and c10d waited for them.
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

}  // namespace

c10::intrusive_ptr<Work> SimGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
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

c10::intrusive_ptr<Work> SimGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
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

c10::intrusive_ptr<Work> SimGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
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

c10::intrusive_ptr<Work> SimGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
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

c10::intrusive_ptr<Work> SimGroup::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
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
  check_numel(input, list[rank_].numel(), "as in this rank's tensor of tensor_list");
  if (same_sizes(list)) {
    auto leg = move_leg(Op::AllGather, call.op, input);
    leg.give = {{raw(input.tensor)}};
    for (const auto& output : list) {
      leg.take.push_back(strided(output));  // NCCL copies from its own buffer, so any strides will do.
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

c10::intrusive_ptr<Work> SimGroup::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  Issue call{.op = "all_gather_into_tensor", .type = OpType::_ALLGATHER_BASE, .async = is_async(opts)};
  add_all_gather(call, {output, "output tensor"}, {input, "input tensor"});
  return issue(std::move(call));
}

c10::intrusive_ptr<Work> SimGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  check_pairs(outputs, inputs, "all_gather_into_tensor_coalesced");
  Issue call{.op = "all_gather_into_tensor_coalesced", .type = OpType::COALESCED, .async = is_async(opts)};
  const auto to = named(outputs, "outputs");
  const auto from = named(inputs, "inputs");
  for (size_t i = 0; i < to.size(); ++i) {
    add_all_gather(call, to[i], from[i]);
  }
  return issue(std::move(call));
}

c10::intrusive_ptr<Work> SimGroup::allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) {
  C10_THROW_ERROR(NotImplementedError, "ProcessGroupNCCL does not support allgather_coalesced, nor does simccl");
}

c10::intrusive_ptr<Work> SimGroup::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) {
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
  check_numel(output, list[rank_].numel(), "as in this rank's tensor of input_list");
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

c10::intrusive_ptr<Work> SimGroup::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  Issue call{.op = "reduce_scatter_tensor", .type = OpType::_REDUCE_SCATTER_BASE, .async = is_async(opts)};
  add_reduce_scatter(call, {output, "output tensor"}, {input, "input tensor"}, opts.reduceOp);
  return issue(std::move(call));
}

c10::intrusive_ptr<Work> SimGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  check_pairs(outputs, inputs, "reduce_scatter_tensor_coalesced");
  Issue call{.op = "reduce_scatter_tensor_coalesced", .type = OpType::COALESCED, .async = is_async(opts)};
  const auto to = named(outputs, "outputs");
  const auto from = named(inputs, "inputs");
  for (size_t i = 0; i < to.size(); ++i) {
    add_reduce_scatter(call, to[i], from[i], opts.reduceOp);
  }
  return issue(std::move(call));
}

c10::intrusive_ptr<Work> SimGroup::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& opts) {
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

c10::intrusive_ptr<Work> SimGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
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

c10::intrusive_ptr<Work> SimGroup::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
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

#if SIM_TORCH_AT_LEAST(2, 14)
c10::intrusive_ptr<Work> SimGroup::gather_single(
    at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  Tensors inputs = {input};
  std::vector<Tensors> outputs;
  // Elsewhere the output does not count.
  if (rank_ == checked_rank(opts.rootRank, "root", "gather_single")) {
    check_contiguous({output, "output tensor"}, device_of({input, "input tensor"}));
    TORCH_CHECK_WITH(
        ValueError, output.numel() == size_ * input.numel(),
        "output tensor size must be equal to world_size times input tensor size");
    outputs.emplace_back();
    for (int rank = 0; rank < size_; ++rank) {
      outputs[0].push_back(output.view(-1).narrow(0, rank * input.numel(), input.numel()).view(input.sizes()));
    }
  }
  return gather(outputs, inputs, opts);
}
#endif

c10::intrusive_ptr<Work> SimGroup::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
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

c10::intrusive_ptr<Work> SimGroup::send(Tensors& tensors, int to, int tag) {
  return point_to_point(tensors, to, tag, OpType::SEND);
}

c10::intrusive_ptr<Work> SimGroup::recv(Tensors& tensors, int from, int tag) {
  return point_to_point(tensors, from, tag, OpType::RECV);
}

c10::intrusive_ptr<Work> SimGroup::recvAnysource(Tensors&, int) {
  C10_THROW_ERROR(NotImplementedError, "ProcessGroupNCCL does not support recvAnysource, nor does simccl");
}

c10::intrusive_ptr<Work> SimGroup::barrier(const c10d::BarrierOptions& opts) {
  Argument tensor{{}, "barrier's own tensor"};
  {
    PlainKernels plain;
    tensor.tensor = at::zeros({1}, at::TensorOptions().device(barrier_device(opts)).dtype(at::kFloat));
  }
  Issue call{.op = "barrier", .type = OpType::BARRIER, .async = is_async(opts), .reads = {tensor}, .writes = {tensor}};
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
  const auto current = current_stream(tensor.tensor.device().index());
  host_waits_stream(current);
  trace_host_wait(current);
  return nullptr;
}

// Checks.

c10::Device SimGroup::device_of(const Argument& argument) const {
  const bool host = on_host_ && argument.tensor.defined() && argument.tensor.device().is_cpu();
  check_device(argument, host ? c10::DeviceType::CPU : kSim);
  return argument.tensor.device();
}

int SimGroup::checked_rank(int64_t rank, const char* what, const char* collective) const {
  check_rank(static_cast<int>(rank), size_, what, collective);
  return static_cast<int>(rank);
}

void SimGroup::check_pairs(const Tensors& outputs, const Tensors& inputs, const char* collective) const {
  TORCH_CHECK_WITH(
      ValueError, !inputs.empty() && outputs.size() == inputs.size(),
      "outputs and inputs must be non-empty lists of the same length, got ", outputs.size(), " and ", inputs.size(),
      " tensors [", collective, "]");
}

// Legs.

Leg SimGroup::move_leg(Op op, const std::string& name, const Argument& argument) const {
  Leg leg;
  leg.request.op = op;
  leg.request.call = c10::str(name, "(", argument.tensor.numel(), " ", argument.tensor.scalar_type(), ")");
  return leg;
}

Leg SimGroup::reduction_leg(Op op, const std::string& name, const Argument& argument, const ReduceOp& reduce) const {
  const auto reduction = reduction_of(reduce, argument, size_);
  Leg leg;
  leg.request.op = op;
  leg.request.dtype = reduction.dtype;
  leg.request.reduce = reduction.op;
  leg.reduction = reduction.name;
  leg.request.call =
      c10::str(name, "(", reduction.name, ", ", argument.tensor.numel(), " ", argument.tensor.scalar_type(), ")");
  leg.divisor = reduction.divisor;
  leg.factor = reduction.factor;
  leg.scalar_factor = reduction.scalar_factor;
  return leg;
}

Leg SimGroup::all_reduce(const std::vector<Argument>& arguments, const ReduceOp& reduce) const {
  auto leg = reduction_leg(Op::AllReduce, "all_reduce", arguments[0], reduce);
  for (const auto& argument : arguments) {
    leg.give.push_back({raw(argument.tensor)});
    leg.take.push_back(raw(argument.tensor));
  }
  leg.stays = size_ == 1 && leg.divisor == 1 && !leg.factor.defined() && leg.scalar_factor == 1;
  return leg;
}

Leg SimGroup::broadcast_leg(const Argument& argument, int root) const {
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

Leg SimGroup::reduce_leg(
    at::Tensor from, at::Tensor to, const Argument& argument, int root, const ReduceOp& reduce) const {
  auto leg = reduction_leg(Op::Reduce, "reduce", argument, reduce);
  leg.request.root = root;
  leg.give = {{std::move(from)}};
  if (rank_ == root) {
    leg.take = {std::move(to)};
  }
  return leg;
}

void SimGroup::add_all_gather(Issue& call, const Argument& to, const Argument& from) const {
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

void SimGroup::add_reduce_scatter(Issue& call, const Argument& to, const Argument& from, const ReduceOp& reduce) const {
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

c10::Device SimGroup::barrier_device(const c10d::BarrierOptions& opts) {
  if (!opts.device_ids.empty()) {
    return c10::Device(kSim, static_cast<c10::DeviceIndex>(opts.device_ids[0]));
  }
  if (const auto bound = getBoundDeviceId()) {
    return *bound;
  }
  if (on_host_) {
    return c10::Device(c10::DeviceType::CPU);  // The caller does not say which device; torch prefers the CPU.
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!streams_.empty()) {
    return c10::Device(kSim, streams_.begin()->first.first);
  }
  // NCCL's group guesses: by the rank in the job, not by the current device, which all ranks may have left at 0.
  const auto& ranks = options_->global_ranks_in_group;
  const auto rank = ranks.empty() ? static_cast<uint64_t>(rank_) : ranks[static_cast<size_t>(rank_)];
  return c10::Device(kSim, static_cast<c10::DeviceIndex>(rank % static_cast<uint64_t>(num_devices())));
}

c10::intrusive_ptr<Work> SimGroup::point_to_point(Tensors& tensors, int peer, int tag, OpType type) {
  TORCH_CHECK(tensors.size() == 1, kOneDevice);
  const bool sends = type == OpType::SEND;
  const Argument tensor{tensors[0], "tensor"};
  device_of(tensor);
  check_rank(peer, size_, "peer", sends ? "send" : "recv");
  check_dtype(tensor);
  TORCH_CHECK_WITH(
      ValueError, tensor.tensor.is_non_overlapping_and_dense(), "Tensors must be dense, got the ", describe(tensor),
      ". NCCL transfers as many elements as it has from where it begins.");
  Issue call{.op = sends ? "send" : "recv", .type = type, .tag = tag};
  auto leg = move_leg(sends ? Op::Send : Op::Recv, call.op, tensor);
  leg.request.call += c10::str(sends ? " to rank " : " from rank ", peer);
  call.title = c10::str(call.op, " ", rank_, sends ? "->" : "<-", peer);
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
  if (!coalescing_ && !has_one_communicator()) {
    call.pair = std::make_pair(std::min(rank_, peer), std::max(rank_, peer));
  }
  return issue(std::move(call));
}

}  // namespace sim
