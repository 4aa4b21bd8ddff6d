#include "fallback.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/copy.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "allocator.h"
#include "cpu_only.h"
#include "generator.h"
#include "host_ops.h"
#include "outcomes.h"
#include "pinned.h"
#include "runtime.h"
#include "settle.h"
#include "sparse.h"
#include "sync_debug.h"
#include "traits.h"
#include "uninitialized.h"
#include "wide.h"

namespace sim {

namespace {

/// A device tensor over a device storage, with the sizes and strides of a CPU tensor.
at::Tensor with_geometry_of(const at::Tensor& host, c10::Storage storage) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  if (host.is_conj()) {
    impl->_set_conj(true);
  }
  if (host.is_neg()) {
    impl->_set_neg(true);
  }
  return tensor;
}

c10::Storage host_storage(const c10::Storage& storage) {
  c10::DataPtr data(storage.data_ptr().get(), c10::Device(c10::DeviceType::CPU));  // owns nothing
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
}

/// A kernel would read or write past the end of the memory, typically that of a parameter whose storage has been freed.
void check_memory(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) {
      return;
    }
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto needed = static_cast<size_t>(last + 1) * tensor.itemsize();
  TORCH_CHECK(
      needed <= tensor.storage().nbytes(), "the storage of a tensor of size ", tensor.sizes(), " must hold at least ",
      needed, " bytes, got ", tensor.storage().nbytes(), tensor.storage().nbytes() == 0 ? ": it has been freed" : "");
}

at::Tensor host_view_over(const at::Tensor& tensor, c10::Storage storage) {
  check_memory(tensor);
  settle(tensor);
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = host.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) {
    impl->_set_conj(true);
  }
  if (tensor.is_neg()) {
    impl->_set_neg(true);
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return host;
}

/// The storage of a CPU tensor as a device storage. The memory is taken over if nothing else holds it. It is copied for
/// a result of several tensors, and if the kernel is Python code that keeps the tensor.
c10::Storage moved_to_device(const at::Tensor& host, c10::DeviceIndex device) {
  const auto nbytes = host.storage().nbytes();
  c10::DataPtr data;
  if (host.use_count() == 1 && host.storage().use_count() == 1) {
    data = adopt(std::move(host.storage().unsafeGetStorageImpl()->mutable_data_ptr()), nbytes, device);
  } else {
    auto copy = c10::GetCPUAllocator()->allocate(nbytes);
    if (nbytes > 0) {
      std::memcpy(copy.get(), host.storage().data(), nbytes);
    }
    data = adopt(std::move(copy), nbytes, device);
  }
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), device_allocator(), /*resizable=*/true);
}

/// One operation: converts its arguments to CPU tensors, runs the CPU's kernel, and converts the results back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Traits& traits, torch::jit::Stack* stack)
      : op_(op), traits_(traits), stack_(stack), first_(stack->size() - traits.arguments.size()) {}

  void run() {
    find_device();
    if (traits_.over_lists && lists_mix_devices()) {
      // One by one, as on CUDA: copies go from device to device, other operations raise.
      return op_.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack_);
    }
    const bool waits = host_waits();
    take_arguments();
    check_devices();
    const bool checked = checking() && !traits_.returns_view;
    const c10::Stream stream = current_stream(device_);
    SitePtr site;
    if (checked) {
      site = here(traits_.name);
      Checker::get().submit(lane_of(stream));
    }
    const Operation operation(checked ? &site : nullptr);
    if (checked) {
      if (Checker::get().any_unwritten()) {
        take_unset(stream, site);
      }
      note_arguments(stream, site);
    }
    {
      // As in torch's generated code for the CPU: what the kernel calls is below autograd.
      const OnHost on_host;
      Outcome outcome(traits_, stack_);
      if (!outcome.replace_kernel()) {
        Widened widened(traits_, stack_);
        op_.redispatchBoxed(c10::DispatchKeySet(host_key()), stack_);
        widened.round();
        outcome.learn();
      }
    }
    for (auto& entry : entries_) {
      if (entry.written) {
        update(entry);
      }
    }
    for (const auto& sparse : sparse_) {
      if (sparse.written) {
        update_sparse(sparse);
      }
    }
    give_results(checked, stream, site);
    if (checked) {
      spread_unset();
    } else if (!traits_.returns_view) {
      for (const auto& entry : entries_) {
        if (entry.written) {
          mark_written(*entry.tensor);
        }
      }
    }
    if (spoilt_) {
      for (auto& entry : entries_) {
        if (entry.written) {
          poison(*entry.tensor);
        }
      }
      for (const auto& result : fresh_) {
        poison(result);
      }
    }
    if (waits) {
      warn_or_fail_on_sync();
      if (checked) {
        host_waits_stream(stream, site);
      }
    }
  }

  /// Whether the host waits for the result. For an index it does if that is a mask, whose values are counted, or on the
  /// CPU, from where it is copied. One value for all that a mask selects is filled in without counting.
  bool host_waits() const {
    if (NoHostWait::active()) {
      return false;
    }
    if (traits_.indices < 0) {
      return traits_.host_waits;
    }
    const auto argument = [&](int place) -> const c10::IValue& {
      return (*stack_)[first_ + static_cast<size_t>(place)];
    };
    bool masks = false;
    for (const c10::IValue& index : argument(traits_.indices).toListRef()) {
      if (!index.isTensor() || !index.toTensor().defined()) {
        continue;
      }
      if (!on_sim(index.toTensor())) {
        return true;
      }
      const auto type = index.toTensor().scalar_type();
      masks |= type == at::kBool || type == at::kByte;
    }
    const bool puts = traits_.arguments.size() >= 4;
    return masks &&
        !(puts && argument(traits_.indices + 1).toTensor().numel() == 1 && !argument(traits_.indices + 2).toBool());
  }

 private:
  struct Entry {
    const at::Tensor* tensor;  // on the device; owned by `arguments_`
    at::Tensor host;
    bool read;
    bool written;
  };
  struct Sparse {
    const at::Tensor* tensor;  // on the device; owned by `arguments_`. Its parts are entries of their own.
    at::Tensor host;
    bool written;
  };
  struct Input {
    size_t argument;
    size_t place;   // in its list
    int64_t shift;  // bytes of the tensors before it in its list
    Unset unset;
  };
  struct Storages {
    const c10::StorageImpl* host;
    c10::Storage sim;
    void* data;
  };

  void find_device() {
    for (size_t i = 0; i < traits_.arguments.size(); ++i) {
      const c10::IValue& value = (*stack_)[first_ + i];
      if (traits_.arguments[i] == Usage::Other) {
        if (value.isDevice() && value.toDevice().type() == kSim && device_ < 0) {
          device_ = index_of(value.toDevice());
        }
      } else if (value.isTensor()) {
        if (on_sim(value.toTensor())) {
          return void(device_ = value.toTensor().device().index());
        }
      } else if (value.isList()) {
        for (const c10::IValue& item : value.toListRef()) {
          if (item.isTensor() && on_sim(item.toTensor())) {
            return void(device_ = item.toTensor().device().index());
          }
        }
      }
    }
    if (device_ < 0) {
      device_ = current_device();
    }
  }

  bool lists_mix_devices() const {
    bool mix = false;
    for (size_t i = 0; i < traits_.arguments.size(); ++i) {
      const c10::IValue& value = (*stack_)[first_ + i];
      if (traits_.arguments[i] == Usage::Other || !value.isTensorList()) {
        continue;
      }
      each_tensor(
          value, [&](const at::Tensor& tensor) { mix |= !on_sim(tensor) || tensor.device().index() != device_; });
    }
    return mix;
  }

  void take_arguments() {
    arguments_.reserve(traits_.arguments.size());
    for (size_t i = 0; i < traits_.arguments.size(); ++i) {
      c10::IValue& slot = (*stack_)[first_ + i];
      arguments_.push_back(std::move(slot));
      slot = replaced(arguments_.back(), i);
    }
  }

  c10::IValue replaced(const c10::IValue& value, size_t i) {
    const Usage use = use_of(i);
    if (use == Usage::Other) {
      if (value.isDevice() && value.toDevice().type() == kSim) {
        return c10::Device(c10::DeviceType::CPU);
      }
      if (static_cast<int>(i) == traits_.generator) {
        const auto given = value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator());
        if (auto generator = cpu_generator(given, device_)) {
          return *generator;
        }
      }
      return value;
    }
    if (value.isTensor()) {
      // As on CUDA, where the host reads it.
      const bool read_by_host = static_cast<int>(i) == traits_.learning_rate && !on_sim(value.toTensor());
      return read_by_host ? value : host_of(value.toTensor(), use);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      list.reserve(value.toListRef().size());
      for (const c10::IValue& item : value.toListRef()) {
        list.push_back(host_of(item.toTensor(), use));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isNone()) {
          list.push_back(std::nullopt);
        } else {
          list.push_back(host_of(item.toTensor(), use));
        }
      }
      return list;
    }
    return value;
  }

  Usage use_of(size_t i) const {
    if (traits_.training >= 0) {
      const auto& updated = traits_.updated_in_training;
      if (std::find(updated.begin(), updated.end(), i) != updated.end() && argument(traits_.training).toBool()) {
        return Usage::ReadWrite;
      }
    }
    return traits_.arguments[i];
  }

  /// The original argument: in `arguments_` if it has been taken from the stack already.
  const c10::IValue& argument(size_t i) const {
    return i < arguments_.size() ? arguments_[i] : (*stack_)[first_ + i];
  }

  at::Tensor host_of(const at::Tensor& tensor, Usage use) {
    if (!on_sim(tensor)) {
      if (tensor.defined() && tensor.dim() > 0 && other_ == nullptr) {
        other_ = &tensor;
      }
      return tensor;
    }
    if (tensor.device().index() != device_ && other_ == nullptr) {
      other_ = &tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == c10::kStrided || is_sparse_coo(tensor), traits_.name,
        ": expected a strided or a sparse COO tensor, got layout ", tensor.layout(),
        ": the simulated accelerator has no kernels for other layouts");
    const bool writes = use != Usage::Read;
    const bool reads = use != Usage::Write;
    if (is_sparse_coo(tensor)) {
      return host_of_sparse(tensor, use);
    }
    if (const auto known = by_tensor_.find(tensor.unsafeGetTensorImpl()); known != by_tensor_.end()) {
      Entry& entry = entries_[known->second];
      entry.read |= reads;
      entry.written |= writes;
      return entry.host;
    }
    by_tensor_.emplace(tensor.unsafeGetTensorImpl(), entries_.size());
    entries_.push_back({&tensor, host_view_over(tensor, host_storage_of(tensor.storage())), reads, writes});
    return entries_.back().host;
  }

  /// The kernel may write the values where they are. It replaces the indices, or leaves them alone.
  at::Tensor host_of_sparse(const at::Tensor& tensor, Usage use) {
    for (auto& known : sparse_) {
      if (known.tensor->is_same(tensor)) {
        known.written |= use != Usage::Read;
        return known.host;
      }
    }
    const auto* parts = parts_of(tensor);
    const at::Tensor indices = host_of(parts_.emplace_back(parts->indices()), Usage::Read);
    const at::Tensor values =
        host_of(parts_.emplace_back(parts->values()), use == Usage::Read ? use : Usage::ReadWrite);
    const OnHost on_host;
    sparse_.push_back({&tensor, sparse_like(tensor, indices, values), use != Usage::Read});
    return sparse_.back().host;
  }

  c10::DispatchKey host_key() const {
    return sparse_.empty() ? c10::DispatchKey::CPU : c10::DispatchKey::SparseCPU;
  }

  /// Tensors that share memory must share it on the CPU too, because kernels check for that.
  c10::Storage host_storage_of(const c10::Storage& storage) {
    const auto known = host_storages_.find(storage.unsafeGetStorageImpl());
    if (known != host_storages_.end()) {
      return known->second;
    }
    auto host = host_storage(storage);
    host_storages_.emplace(storage.unsafeGetStorageImpl(), host);
    storages_.push_back({host.unsafeGetStorageImpl(), storage, host.mutable_data()});
    return host;
  }

  void check_devices() const {
    TORCH_CHECK(
        other_ == nullptr || traits_.mixes_devices,
        "Expected all tensors to be on the same device, but found at least two devices, ", c10::Device(kSim, device_),
        " and ", other_->device(), "! (", traits_.name, ")");
    check_not_cpu_only(traits_.name);
    TORCH_CHECK_NOT_IMPLEMENTED(
        op_.hasComputedKernelForDispatchKey(host_key()), "Could not run '", traits_.name,
        "' on the simulated accelerator: it runs the kernels of the CPU, and the CPU has none for this operation",
        sparse_.empty() ? "." : " on sparse tensors.");
  }

  void note_arguments(c10::Stream stream, const SitePtr& site) {
    for (const auto& entry : entries_) {
      if (entry.read) {
        spoilt_ |= note_access(*entry.tensor, Kind::Read, stream, site);
      }
      if (entry.written) {
        spoilt_ |= note_access(*entry.tensor, Kind::Write, stream, site);
      }
    }
    if (!pinned_copies_in_flight()) {
      return;
    }
    // The host reads scalars on the CPU.
    for (const auto& value : arguments_) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (tensor.is_cpu() && tensor.layout() == c10::kStrided) {
          expose_pinned(tensor);
          spoilt_ |= note_access(tensor, Kind::Read, kHost, site);
        }
      });
    }
  }

  /// What the inputs have that nothing has written. Where the host waits for the result, that is a use.
  void take_unset(c10::Stream stream, const SitePtr& site) {
    const bool without_first = traits_.beta >= 0 && is_zero(arguments_[traits_.beta]);
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const Usage use = use_of(i);
      if (use == Usage::Other || use == Usage::Write || (i == 0 && without_first)) {
        continue;
      }
      size_t place = 0;
      int64_t shift = 0;
      each_tensor(arguments_[i], [&](const at::Tensor& argument) {
        const at::Tensor tensor = memory_of(argument);
        auto unset = unset_of(tensor);
        if (unset && traits_.host_waits && !(i == 0 && traits_.decides_by_mask)) {
          spoilt_ |= note_use(tensor, *unset, lane_of(stream), site);
        } else if (unset) {
          unset_.push_back({i, place, shift, std::move(*unset)});
        }
        ++place;
        shift += static_cast<int64_t>(tensor.nbytes());
      });
    }
  }

  /// The tensor with the data: the values of a sparse one.
  static at::Tensor memory_of(const at::Tensor& tensor) {
    return is_sparse_coo(tensor) ? parts_of(tensor)->values() : tensor;
  }

  int64_t shift_of(const Input& input) const {
    return traits_.flow == Flow::Pieces ? input.shift : 0;
  }

  static bool is_zero(const c10::IValue& value) {
    return value.isScalar() && !value.isComplexDouble() && value.toScalar().toDouble() == 0;
  }

  /// The results of unwritten inputs are unwritten.
  void spread_unset() {
    if (unset_.empty()) {
      return;
    }
    std::vector<std::pair<size_t, at::Tensor>> targets;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (use_of(i) == Usage::Write || use_of(i) == Usage::ReadWrite) {
        size_t place = 0;
        each_tensor(arguments_[i], [&](const at::Tensor& tensor) { targets.emplace_back(place++, memory_of(tensor)); });
      }
    }
    for (size_t i = 0; i < fresh_.size(); ++i) {
      targets.emplace_back(i, fresh_[i]);
    }
    const bool first_dim = traits_.flow != Flow::Pieces || joins_first_dim();
    for (const auto& input : unset_) {
      for (const auto& [place, target] : targets) {
        if (first_dim && (!traits_.over_lists || place == input.place)) {
          spread(input.unset, target, sparse_.empty() ? traits_.flow : Flow::Selects, shift_of(input));
        }
        if (traits_.flow == Flow::Product && !input.unset.all && sparse_.empty()) {
          spread_operand(input.argument, target);
        }
      }
    }
  }

  void spread_operand(size_t argument, const at::Tensor& target) {
    for (const auto& [place, dims] : traits_.kept) {
      if (place == argument) {
        spread_product(arguments_[argument].toTensor(), dims, target);
      }
    }
  }

  /// Whether a `cat` puts its tensors one after another in memory.
  bool joins_first_dim() const {
    return arguments_.size() > 1 && arguments_[1].isInt() && arguments_[1].toInt() == 0;
  }

  /// Apply to the device tensor what the kernel did to the CPU tensor's sizes, strides and memory.
  void update(const Entry& entry) {
    auto* impl = entry.tensor->unsafeGetTensorImpl();
    const auto& host = entry.host;
    const auto* storage = host.storage().unsafeGetStorageImpl();
    const auto known =
        std::find_if(storages_.begin(), storages_.end(), [&](const Storages& one) { return one.host == storage; });
    if (known == storages_.end()) {
      impl->set_storage_keep_dtype(moved_to_device(host, device_));  // its memory was replaced
      remade_.push_back(entry.tensor);
    } else if (known->sim.unsafeGetStorageImpl() != impl->unsafe_storage().unsafeGetStorageImpl()) {
      impl->set_storage_keep_dtype(known->sim);  // by the memory of another argument
    } else if (storage->data_ptr().get() != known->data) {
      auto* resized = impl->unsafe_storage().unsafeGetStorageImpl();
      const auto nbytes = storage->nbytes();
      resized->set_data_ptr_noswap(
          adopt(std::move(host.storage().unsafeGetStorageImpl()->mutable_data_ptr()), nbytes, device_));
      resized->set_nbytes(nbytes);
      known->data = nullptr;  // taken over
      remade_.push_back(entry.tensor);
    }
    if (impl->sizes() != host.sizes() || impl->strides() != host.strides() ||
        impl->storage_offset() != host.storage_offset()) {
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  void update_sparse(const Sparse& sparse) {
    const auto* host = parts_of(sparse.host);
    // Indices count as read, but the kernel may have resized their memory.
    const at::Tensor indices = parts_of(*sparse.tensor)->indices();
    for (const auto& entry : entries_) {
      if (!entry.written && entry.tensor->is_same(indices)) {
        update(entry);
      }
    }
    replace_parts(*sparse.tensor, sparse.host, result_of(host->indices()), result_of(host->values()));
  }

  void give_results(bool checked, c10::Stream stream, const SitePtr& site) {
    const auto num_results = op_.schema().returns().size();
    const size_t begin = stack_->size() - num_results;
    for (size_t i = begin; i < stack_->size(); ++i) {
      c10::IValue& value = (*stack_)[i];
      if (value.isTensor()) {
        at::Tensor host = std::move(value).toTensor();
        value = result_of(std::move(host));
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        auto hosts = std::move(value).toTensorVector();
        for (auto& host : hosts) {
          list.push_back(result_of(std::move(host)));
        }
        value = std::move(list);
      }
    }
    if (!checked) {
      return;
    }
    for (const auto* tensor : remade_) {
      spoilt_ |= note_access(*tensor, Kind::Write, stream, site);
    }
    for (const auto& result : fresh_) {
      spoilt_ |= note_access(result, Kind::Write, stream, site);
    }
  }

  at::Tensor result_of(at::Tensor host) {
    if (!host.defined() || !host.is_cpu()) {
      return host;
    }
    for (const auto& entry : entries_) {
      if (host.is_same(entry.host)) {
        return *entry.tensor;
      }
    }
    for (const auto& value : arguments_) {
      if (value.isTensor() && host.is_same(value.toTensor())) {
        return host;  // a CPU tensor among the arguments
      }
    }
    if (is_sparse_coo(host)) {
      return sparse_result_of(host);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        host.layout() == c10::kStrided && !host.is_nested(), traits_.name,
        ": expected a strided or a sparse COO result, got layout ",
        host.is_nested() ? "nested" : c10::str(host.layout()),
        ": the simulated accelerator has no tensors of other layouts");
    const auto* storage = host.storage().unsafeGetStorageImpl();
    for (const auto& known : storages_) {
      if (known.host == storage) {
        return with_geometry_of(host, known.sim);
      }
    }
    c10::Storage sim = moved_to_device(host, device_);
    held_.push_back(host.storage());
    storages_.push_back({storage, sim, nullptr});
    fresh_.push_back(with_geometry_of(host, std::move(sim)));
    return fresh_.back();
  }

  at::Tensor sparse_result_of(const at::Tensor& host) {
    for (const auto& known : sparse_) {
      if (host.is_same(known.host)) {
        return *known.tensor;
      }
    }
    const auto* parts = parts_of(host);
    return sparse_like(host, result_of(parts->indices()), result_of(parts->values()));
  }

  const c10::OperatorHandle& op_;
  const Traits& traits_;
  torch::jit::Stack* stack_;
  size_t first_;
  c10::DeviceIndex device_ = -1;
  const at::Tensor* other_ = nullptr;  // the first tensor on another device
  std::vector<c10::IValue> arguments_;
  std::vector<Entry> entries_;
  std::deque<at::Tensor> parts_;  // of sparse arguments
  std::vector<Sparse> sparse_;
  std::unordered_map<const c10::TensorImpl*, size_t> by_tensor_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> host_storages_;
  std::vector<Storages> storages_;
  std::vector<c10::Storage> held_;         // so that no other storage can get the address of one in `storages_`
  std::vector<const at::Tensor*> remade_;  // arguments whose memory was resized
  std::vector<at::Tensor> fresh_;
  std::vector<Input> unset_;
  bool spoilt_ = false;
};

}  // namespace

namespace {
thread_local bool no_host_wait = false;
}  // namespace

NoHostWait::NoHostWait() : before_(std::exchange(no_host_wait, true)) {}

NoHostWait::~NoHostWait() {
  no_host_wait = before_;
}

bool NoHostWait::active() {
  return no_host_wait;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, traits_of(op), stack).run();
}

std::vector<at::Tensor> on_host(
    const std::string& name, const std::vector<at::Tensor>& read,
    const std::function<std::vector<at::Tensor>()>& compute) {
  const auto device = read.at(0).device().index();
  const c10::Stream stream = current_stream(device);
  const bool checked = checking();
  const SitePtr site = checked ? here(name) : nullptr;
  const Operation operation(checked ? &site : nullptr);
  bool spoilt = false;
  std::vector<Unset> unset;
  if (checked) {
    Checker::get().submit(lane_of(stream));
    for (const auto& tensor : read) {
      spoilt |= note_access(tensor, Kind::Read, stream, site);
      if (auto found = unset_of(tensor)) {
        unset.push_back(std::move(*found));
      }
    }
  }
  std::vector<at::Tensor> results;
  for (auto& host : compute()) {
    at::Tensor result;
    if (host.defined()) {
      result = with_geometry_of(host, moved_to_device(host, device));
      if (checked) {
        spoilt |= note_access(result, Kind::Write, stream, site);
        for (const auto& of_input : unset) {
          spread(of_input, result, Flow::Selects);
        }
      }
    }
    results.push_back(std::move(result));
  }
  if (spoilt) {
    for (const auto& result : results) {
      poison(result);
    }
  }
  return results;
}

at::Tensor host_view(const at::Tensor& tensor) {
  if (!on_sim(tensor)) {
    return tensor;
  }
  return host_view_over(tensor, host_storage(tensor.storage()));
}

void poison(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) {
    return;
  }
  const at::Tensor host = host_view(tensor);
  if (host.is_contiguous()) {
    std::memset(host.data_ptr(), 0xFF, host.nbytes());
    return;
  }
  const OnHost on_host;
  at::Tensor nan = at::detail::empty_cpu({}, host.scalar_type());
  std::memset(nan.data_ptr(), 0xFF, nan.nbytes());
  host.copy_(nan);
}

namespace {

/// Composite operations that choose by the type of the device: run as a whole, so that the CPU chooses as it does for
/// CPU tensors. And operations on lists of tensors, which are one operation as on other accelerators.
bool chooses_by_device(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::convolution", "aten::_convolution", "aten::convolution_backward", "aten::linalg_lstsq"};
  return names->count(name) > 0 || starts_with(name, "aten::_foreach_");
}

void register_fallbacks_for(c10::DispatchKey key, c10::DispatchKey host_key) {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!starts_with(name.name, "aten::")) {
      continue;
    }
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(key)) {
      continue;
    }
    const bool composed = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (!composed) {
      continue;
    }
    const bool chooses = host_key == c10::DispatchKey::CPU && chooses_by_device(name.name);
    if (!op->hasKernelForDispatchKey(host_key) && !chooses) {
      continue;
    }
    std::string text = name.name.substr(6);
    if (!name.overload_name.empty()) {
      text += "." + name.overload_name;
    }
    library->impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace

void register_fallbacks() {
  // torch uses a backend's boxed fallback only for operations without any kernel. An operation with a CPU kernel and a
  // composite kernel (layer norm, for example) would run the composite one here, whose sums differ from the CPU's in
  // the last bit. So each of these operations gets the fallback by name, and the same for sparse tensors.
  register_fallbacks_for(c10::DispatchKey::PrivateUse1, c10::DispatchKey::CPU);
  register_fallbacks_for(c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCPU);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace sim
