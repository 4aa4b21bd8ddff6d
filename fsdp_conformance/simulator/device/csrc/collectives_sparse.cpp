// The all-reduce of sparse tensors. NCCL has none. gloo has one for tensors on GPUs too: it sums them on the host, and
// the result arrives in the tensor when the program has waited for it.
//
// Here the ranks gather each other's indices and values on the group's stream, and each rank adds them up there.
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <algorithm>

#include "fallback.h"
#include "group.h"
#include "runtime.h"
#include "sparse.h"

namespace sim {
namespace {

/// Makes a stream the current one for its lifetime.
class OnStream {
 public:
  explicit OnStream(c10::Stream stream) : before_(set_current_stream(stream)) {}
  ~OnStream() {
    set_current_stream(before_);
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  c10::Stream before_;
};

/// A tensor with as many rows as the longest of all ranks: the given ones, then zeros.
at::Tensor with_rows(const at::Tensor& rows, int64_t count) {
  auto sizes = rows.sizes().vec();
  sizes[0] = count;
  at::Tensor padded = at::zeros(sizes, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  return padded;
}

/// Room for such a tensor from every rank.
at::Tensor room_for(const at::Tensor& rows, int size) {
  auto sizes = rows.sizes().vec();
  sizes[0] *= size;
  return at::empty(sizes, rows.options());
}

/// The rows of all ranks without what was added to make them equally many.
at::Tensor joined(const at::Tensor& gathered, const std::vector<int64_t>& counts) {
  const int64_t most = gathered.size(0) / static_cast<int64_t>(counts.size());
  Tensors own;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    own.push_back(gathered.narrow(0, static_cast<int64_t>(rank) * most, counts[rank]));
  }
  return at::cat(own);
}

/// c10d has this operation for dense tensors on any device, but for sparse ones only on the CPU and on CUDA.
void allreduce_of_sparse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto arguments = torch::jit::pop(*stack, count);
  auto tensors = arguments.at(0).toTensorVector();
  const auto group = arguments.at(1).toCustomClass<c10d::ProcessGroup>();
  c10d::AllreduceOptions options;
  options.reduceOp = *arguments.at(2).toCustomClass<ReduceOp>();
  auto work = group->getBackend(kSim)->allreduce_sparse(tensors, options);
  stack->emplace_back(std::move(tensors));
  stack->emplace_back(std::move(work));
}

}  // namespace

void SimGroup::allow_sparse() {
  sparse_ = true;
}

bool SimGroup::allows_sparse() const {
  return sparse_;
}

std::vector<int64_t> SimGroup::counts_of_all(int64_t count) const {
  Request request{Op::AllGather};
  request.dtype = at::kLong;
  {
    PlainKernels plain;
    request.give = {at::full({1}, count, at::kLong)};
  }
  request.take.assign(static_cast<size_t>(size_), 1);
  request.call = "all_reduce of a sparse tensor";
  const auto exchange = on_device_->transport->start(std::move(request));
  std::vector<int64_t> counts;
  WithoutGil released;
  TORCH_CHECK_WITH(DistBackendError, exchange->wait(std::nullopt), "timed out in the all_reduce of a sparse tensor");
  for (const auto& result : exchange->results()) {
    counts.push_back(*result.const_data_ptr<int64_t>());
  }
  return counts;
}

c10::intrusive_ptr<Work> SimGroup::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  TORCH_CHECK(
      sparse_, "NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead, or the gloo ",
      "backend. (Nor does simccl.)");
  TORCH_CHECK_WITH(ValueError, tensors.size() == 1, "all_reduce of sparse tensors takes one tensor");
  TORCH_CHECK_WITH(
      ValueError, opts.reduceOp.op_ == ReduceOp::SUM,
      "unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)");
  TORCH_CHECK(!coalescing_, "all_reduce of sparse tensors cannot be coalesced with other collectives");
  const at::Tensor& tensor = tensors[0];
  const auto device = tensor.device();
  const auto caller = current_stream(device.index());
  const auto stream = stream_of(device);
  stream_waits(stream, Checker::get().snapshot(lane_of(caller)), Wait::CollectiveIssue);
  const PlainKernels plain;
  const NoHostWait no_wait;
  const OnStream on(stream);
  const Tensors held = {tensor._indices(), tensor._values()};

  const at::Tensor own = tensor.coalesce();
  const auto counts = counts_of_all(own._nnz());
  const auto most = *std::max_element(counts.begin(), counts.end());
  const Tensors gives = {with_rows(own._indices().t(), most), with_rows(own._values(), most)};
  const Tensors takes = {room_for(gives[0], size_), room_for(gives[1], size_)};
  Issue call{.op = "all_reduce", .type = OpType::ALLREDUCE, .async = false};
  add_all_gather(call, {takes[0], "indices"}, {gives[0], "indices"});
  add_all_gather(call, {takes[1], "values"}, {gives[1], "values"});
  std::shared_ptr<CollectiveCall> made;
  issue(std::move(call), &made);
  const at::Tensor sum =
      at::_sparse_coo_tensor_unsafe(joined(takes[0], counts).t(), joined(takes[1], counts), tensor.sizes()).coalesce();

  replace_parts(tensor, sum, sum._indices(), sum._values());
  // gloo's result is copied into memory of the caller's stream.
  for (const auto& part : {sum._indices(), sum._values()}) {
    record_stream(part.storage().data_ptr(), caller);
  }
  auto work = make_work(made, OpType::ALLREDUCE, held, {tensor}, end_of(stream, held, nullptr));
  work->complete_future();
  return work;
}

TORCH_LIBRARY_IMPL(c10d, SparsePrivateUse1, library) {
  library.impl("allreduce_", torch::CppFunction::makeFromBoxedFunction<&allreduce_of_sparse>());
}

}  // namespace sim
