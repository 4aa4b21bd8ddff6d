#include "group.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>

#include "cuda_names.h"
#include "exchange_order.h"
#include "gpu_trace.h"
#include "runtime.h"
#include "uninitialized.h"

namespace sim {
namespace {

bool is_message(OpType type) {
  return type == OpType::SEND || type == OpType::RECV;
}

/// Whether an access of a call has raced, so that its values are poisoned.
struct Noted {
  bool reads_poisoned = false;
  bool writes_poisoned = false;
};

/// Collectives whose input is meaningless if nothing of it is written. Others move parts that may be padding.
bool uses_all(const std::string& op) {
  return op == "all_reduce" || op == "all_reduce_coalesced" || op == "reduce" || op == "reduce_scatter" ||
      op == "reduce_scatter_tensor" || op == "reduce_scatter_tensor_coalesced" || op == "broadcast" || op == "send";
}

/// Whether the input of a call is meaningless, because nothing of it is written. A list is the parts of one input.
bool uses(const Issue& call, const std::vector<std::pair<size_t, Unset>>& unset, const Unset& one) {
  const auto all = [](const auto& input) { return input.second.all; };
  const bool is_list = call.op == "reduce_scatter";
  return one.all && uses_all(call.op) &&
      (!is_list || (unset.size() == call.reads.size() && std::all_of(unset.begin(), unset.end(), all)));
}

/// What a rank gave unwritten is unwritten in its own part of the result. What others gave counts as written.
void spread_own(const Issue& call, size_t input, const Unset& unset, int rank) {
  if (call.op == "all_reduce" || call.op == "all_reduce_coalesced") {
    spread(unset, call.writes[input].tensor, Flow::Elementwise);
  } else if (call.op == "all_gather_into_tensor" || call.op == "all_gather_into_tensor_coalesced") {
    spread(unset, call.writes[input].tensor, Flow::Pieces, rank * unset.numel * unset.itemsize);
  } else if (call.op == "all_gather") {
    spread(unset, call.writes[rank].tensor, Flow::Elementwise);
  } else if (call.op == "reduce_scatter") {
    if (input == static_cast<size_t>(rank)) {
      spread(unset, call.writes[0].tensor, Flow::Elementwise);
    }
  } else if (call.op == "reduce_scatter_tensor" || call.op == "reduce_scatter_tensor_coalesced") {
    const auto& output = call.writes[input].tensor;
    if (const auto part = part_of(unset, rank * output.numel(), output.numel())) {
      spread(*part, output, Flow::Elementwise);
    }
  }
}

Noted note(const Issue& call, c10::Stream stream, const SitePtr& site, int rank) {
  Noted noted;
  std::vector<std::pair<size_t, Unset>> unset;
  for (size_t i = 0; i < call.reads.size(); ++i) {
    const auto& tensor = call.reads[i].tensor;
    noted.reads_poisoned |= note_access(tensor, Kind::Read, stream, site);
    if (auto found = unset_of(tensor)) {
      unset.emplace_back(i, std::move(*found));
    }
  }
  for (const auto& leg : call.legs) {
    if (leg.factor.defined() && leg.factor.device().type() == kSim) {
      noted.reads_poisoned |= note_access(leg.factor, Kind::Read, stream, site);
    }
  }
  for (const auto& argument : call.writes) {
    noted.writes_poisoned |= note_access(argument.tensor, Kind::Write, stream, site);
  }
  for (const auto& [input, bytes] : unset) {
    if (uses(call, unset, bytes)) {
      noted.reads_poisoned |= note_use(call.reads[input].tensor, bytes, lane_of(stream), site);
    } else {
      spread_own(call, input, bytes, rank);
    }
  }
  return noted;
}

/// Whether a leg involves the peers: in an all-to-all they may exchange data even if this rank does not.
bool is_exchanged(const Leg& leg) {
  return !leg.empty() || leg.request.op == Op::AllToAll;
}

/// As `fsdp_conformance.history.collective.Op` has it.
const char* name_of(Op op) {
  switch (op) {
    case Op::AllReduce:
      return "all_reduce";
    case Op::Reduce:
      return "reduce";
    case Op::ReduceScatter:
      return "reduce_scatter";
    case Op::AllGather:
      return "all_gather";
    case Op::Broadcast:
      return "broadcast";
    case Op::Gather:
      return "gather";
    case Op::Scatter:
      return "scatter";
    case Op::AllToAll:
      return "all_to_all";
    case Op::Send:
      return "send";
    case Op::Recv:
      return "recv";
  }
  return "unknown";
}

std::vector<int64_t> numels(const Tensors& places) {
  std::vector<int64_t> result;
  for (const auto& place : places) {
    result.push_back(place.numel());
  }
  return result;
}

Called called(const Leg& leg, const Issue& call, c10::Device device) {
  const bool is_barrier = call.type == OpType::BARRIER;
  Tensors given;
  for (const auto& places : leg.give) {
    given.insert(given.end(), places.begin(), places.end());
  }
  const Op op = leg.request.op;
  // Where only the root gives or takes, the other side; a reduce-scatter's input may be one tensor or a list.
  const bool by_result = op == Op::ReduceScatter || op == Op::Scatter || given.empty();
  const auto& counted = by_result ? leg.take : given;
  Called result;
  result.op = is_barrier ? "barrier" : name_of(op);
  result.device = device.index();
  result.tag = call.tag;
  result.is_paired = call.pair.has_value();
  if (is_barrier) {
    return result;
  }
  result.reduction = leg.reduction;
  const bool has_root = op == Op::Reduce || op == Op::Broadcast || op == Op::Gather || op == Op::Scatter;
  if (has_root || op == Op::Send || op == Op::Recv) {
    result.root = leg.request.root;
  }
  if (!counted.empty()) {
    result.dtype = c10::toString(counted[0].scalar_type());
  }
  if (op == Op::AllToAll) {
    result.sends = numels(given);
    result.takes = numels(leg.take);
  }
  for (const int64_t numel : numels(counted)) {
    result.numel += numel;
  }
  return result;
}

}  // namespace

SimGroup::SimGroup(
    std::shared_ptr<Transport> transport, std::shared_ptr<Transport> host, int rank, int size, const std::string& name,
    c10::intrusive_ptr<SimOptions> options)
    : c10d::Backend(rank, size),
      on_device_(std::make_shared<GroupState>(name, rank, std::move(transport))),
      on_host_(host ? std::make_shared<GroupState>(name, rank, std::move(host)) : nullptr),
      options_(std::move(options)) {
  init();
}

SimGroup::~SimGroup() {
  for (const auto& shelf : shelves_) {
    shelf->leave();
  }
}

const std::string SimGroup::getBackendName() const {
  return "simccl";
}

c10::intrusive_ptr<c10d::Backend::Options> SimGroup::getBackendOptions() {
  return options_;
}

c10::intrusive_ptr<SimOptions> SimGroup::options() const {
  return options_;
}

bool SimGroup::supportsSplitting() const {
  return SIM_TORCH_AT_LEAST(2, 9);
}

bool SimGroup::supportsCoalescing() const {
  return true;
}

void SimGroup::setTimeout(milliseconds timeout) {
  options_->timeout = timeout;
  for (const auto& state : states()) {
    state->transport->set_timeout(timeout);
  }
}

void SimGroup::eagerConnectSingleDevice(at::Device) {
  eager_ = true;
}

bool SimGroup::has_one_communicator() const {
  // Before torch 2.9 this backend cannot declare that it splits groups, as NCCL's does, and torch connects only those
  // that do.
  return eager_ || (!SIM_TORCH_AT_LEAST(2, 9) && getBoundDeviceId().has_value());
}

void SimGroup::abort() {
  WithoutGil released;
  for (const auto& state : states()) {
    state->abort(c10::str("group ", state->name, " was aborted on rank ", rank_));
  }
}

void SimGroup::abort_because(const std::string& reason) {
  WithoutGil released;
  for (const auto& state : states()) {
    state->abort(reason);
  }
}

void SimGroup::watch(Watcher watcher) {
  watcher_ = std::make_shared<const Watcher>(std::move(watcher));
}

void SimGroup::shutdown() {
  WithoutGil released;
  for (const auto& state : states()) {
    state->drain();
  }
}

#if SIM_TORCH_AT_LEAST(2, 9)
c10::intrusive_ptr<c10d::Backend> SimGroup::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
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
  part->sparse_ = sparse_;
  return part;
}
#endif

uint64_t SimGroup::getSequenceNumberForGroup() {
  return num_collectives_;
}

void SimGroup::startCoalescing() {
  coalescing_.emplace();
}

c10::intrusive_ptr<Work> SimGroup::endCoalescing() {
  TORCH_CHECK(coalescing_, "end_coalescing without start_coalescing");
  Coalescing coalesced = std::move(*coalescing_);
  coalescing_.reset();
  if (coalesced.tensors.empty()) {
    return nullptr;  // No collective was called in between.
  }
  const auto& stream = coalesced.stream;
  publish(coalesced.call, stream, coalesced.tensors);
  if (stream) {
    ExchangeOrder::get().issued(lane_of(*stream));
  }
  show_to_profiler("coalesced", {});
  auto work = make_work(
      coalesced.call, OpType::COALESCED, coalesced.tensors, {},
      stream ? std::make_optional(end_of(*stream, coalesced.tensors, nullptr)) : std::nullopt);
  if (stream) {
    work->complete_future();
  }
  return coalesced.async || !stream ? work : nullptr;
}

c10::Stream SimGroup::stream_of(c10::Device device, std::optional<std::pair<int, int>> pair) {
  const auto key = std::make_pair(device.index(), pair.value_or(std::make_pair(-1, -1)));
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = streams_.find(key);
  if (found == streams_.end()) {
    const auto stream = new_stream(device.index(), options_->is_high_priority_stream ? -1 : 0);
    found = streams_.emplace(key, stream).first;
    Checker::get().rename_lane(
        lane_of(stream),
        pair ? c10::str("ranks ", pair->first, " and ", pair->second, " of group ", on_device_->name)
             : c10::str("group ", on_device_->name));
  }
  return found->second;
}

c10::intrusive_ptr<Work> SimGroup::issue(Issue call, std::shared_ptr<CollectiveCall>* made) {
  Tensors held;
  for (const auto* arguments : {&call.reads, &call.writes}) {
    for (const auto& argument : *arguments) {
      held.push_back(argument.tensor);
    }
  }
  show_to_profiler(call.title.empty() ? call.op : call.title, call.reads.empty() ? call.writes : call.reads);
  if (watcher_ && held[0].device().type() == kSim) {
    for (const auto& leg : call.legs) {
      if (is_exchanged(leg) && !leg.local) {
        (*watcher_)(called(leg, call, held[0].device()));
      }
    }
  }
  std::optional<c10::Stream> stream;
  Noted noted;
  SitePtr site;
  if (held[0].device().type() == kSim) {
    clear_shelves();
    site = checking() ? here(call.op) : nullptr;
    Operation running(&site);
    if (!call.through.empty()) {
      held.push_back(buffer_for(call.through));
      call.writes.push_back({held.back(), "simccl's own buffer"});
    }
    stream = enter_stream(call, held[0].device());
    Checker::get().submit(lane_of(*stream));
    if (site) {
      noted = note(call, *stream, site, rank_);
    } else {
      for (const auto& argument : call.writes) {
        mark_written(argument.tensor);
      }
    }
  }
  if (!coalescing_) {
    ++num_collectives_;
  }
  auto target = coalescing_ ? coalescing_->call : std::make_shared<CollectiveCall>();
  for (auto& leg : call.legs) {
    if (is_exchanged(leg)) {
      target->add(
          start(std::move(leg), noted.reads_poisoned, noted.writes_poisoned, *state_of(stream.has_value())->transport));
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
    // This Work waits for nothing: only the end of the whole batch is recorded.
    const End nothing{*stream, {}, std::make_shared<Shelf>(Tensors{}, Clock{}), {}};
    return make_work(target, call.type, held, std::move(call.results), nothing);
  }
  publish(target, stream, held);
  if (stream) {
    ExchangeOrder::get().issued(lane_of(*stream));
    if (!call.async) {
      return nullptr;
    }
  }
  auto work = make_work(
      target, call.type, held, std::move(call.results),
      stream ? std::make_optional(end_of(*stream, is_message(call.type) ? Tensors{} : held, site)) : std::nullopt);
  if (stream) {
    work->complete_future();
    if (call.type == OpType::ALLGATHER && !call.through.empty()) {
      work->set_stacked();
    }
  }
  return work;
}

void SimGroup::publish(
    const std::shared_ptr<CollectiveCall>& call, const std::optional<c10::Stream>& stream, const Tensors& held) const {
  if (stream) {
    const Lane lane = lane_of(*stream);
    const Clock clock = Checker::get().snapshot(lane);
    // A stream has no entry in its clock yet if none of its operations was checked.
    const uint64_t tick = time_of(clock, lane);
    call->publish(stream->device_index(), lane, tick);
  } else {
    call->hold(held);
  }
  state_of(stream.has_value())->started(call);
}

at::Tensor SimGroup::buffer_for(const Tensors& list) const {
  PlainKernels plain;
  std::vector<int64_t> sizes = {size_};
  sizes.insert(sizes.end(), list[0].sizes().begin(), list[0].sizes().end());
  return at::empty(sizes, at::TensorOptions().device(list[0].device()).dtype(list[0].scalar_type()));
}

c10::Stream SimGroup::enter_stream(const Issue& call, c10::Device device) {
  const auto current = current_stream(device.index());
  const auto stream = call.async ? stream_of(device, call.pair) : current;
  if (stream != current) {
    stream_waits(stream, Checker::get().snapshot(lane_of(current)), Wait::CollectiveIssue);
    trace_record(this, current);
    trace_wait(this, stream);
  }
  if (is_message(call.type)) {
    // The one place where NCCL still calls record_stream: a program need not wait for an isend.
    const auto& tensor = (call.reads.empty() ? call.writes : call.reads)[0].tensor;
    record_stream(tensor.storage().data_ptr(), stream);
  }
  return stream;
}

c10::intrusive_ptr<SimWork> SimGroup::make_work(
    std::shared_ptr<CollectiveCall> call, OpType type, const Tensors& inputs, Tensors results,
    std::optional<End> end) const {
  return c10::make_intrusive<SimWork>(
      state_of(end.has_value()), std::move(call), type, num_collectives_, inputs, std::move(results), std::move(end));
}

void SimGroup::show_to_profiler(const std::string& op, const std::vector<Argument>& inputs) const {
  at::RecordFunction event(at::RecordScope::USER_SCOPE);
  if (!event.isActive()) {
    return;
  }
  static const std::unordered_map<std::string, const char*> names = {
      {"all_gather_into_tensor", "_all_gather_base"},
      {"reduce_scatter_tensor", "_reduce_scatter_base"},
      {"all_to_all_single", "all_to_all"},
      {"all_reduce_coalesced", "allreduce_coalesced"},
      {"barrier", "all_reduce_barrier"}};
  const auto found = names.find(op);
  const char* backend = !cuda_names() ? "simccl:" : sparse_ ? "gloo:" : "nccl:";
  const std::string title = backend + (found == names.end() || !cuda_names() ? op : found->second);
  std::vector<c10::IValue> shown;
  for (const auto& input : inputs) {
    shown.emplace_back(input.tensor);
  }
  event._setAsync();
  event.before(title, c10::ArrayRef<const c10::IValue>(shown.data(), shown.size()));
  event.end();
}

void SimGroup::clear_shelves() {
  std::vector<std::shared_ptr<Shelf>> shelves;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    shelves = std::exchange(shelves_, {});
  }
  const auto cleared = [](const auto& earlier) { return earlier->clear_if_host_knows(); };
  shelves.erase(std::remove_if(shelves.begin(), shelves.end(), cleared), shelves.end());
  std::lock_guard<std::mutex> lock(mutex_);
  shelves_.insert(shelves_.end(), shelves.begin(), shelves.end());
}

End SimGroup::end_of(c10::Stream stream, const Tensors& held, const SitePtr& site) {
  auto clock = Checker::get().snapshot(lane_of(stream));
  auto shelf = std::make_shared<Shelf>(held, clock);
  trace_record(shelf.get(), stream);
  std::lock_guard<std::mutex> lock(mutex_);
  shelves_.push_back(shelf);
  Mark mark = site ? Checker::get().mark(lane_of(stream), site) : Mark{};
  return {stream, std::move(clock), std::move(shelf), std::move(mark)};
}

const std::shared_ptr<GroupState>& SimGroup::state_of(bool on_device) const {
  return on_device ? on_device_ : on_host_;
}

std::vector<std::shared_ptr<GroupState>> SimGroup::states() const {
  return on_host_ ? std::vector{on_device_, on_host_} : std::vector{on_device_};
}

}  // namespace sim
