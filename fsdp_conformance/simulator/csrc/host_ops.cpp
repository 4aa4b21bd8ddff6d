#include "host_ops.h"

#include <torch/library.h>

#include <atomic>

#include "allocator.h"
#include "pinned.h"
#include "runtime.h"
#include "traits.h"

namespace sim {

namespace {

std::atomic<bool> watch{true};

/// Whether this is where a kernel of the CPU begins: neither composed of other operations, nor for another device, nor
/// for a tensor that Python dispatches.
bool is_host_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const Traits& traits) {
  if (!keys.has_backend(c10::BackendComponent::CPUBit) || keys.has_backend(c10::BackendComponent::PrivateUse1Bit) ||
      keys.has(c10::DispatchKey::Python))
    return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || starts_with(traits.name, "aten::copy_");
}

void note_host_access(const c10::IValue& value, Argument use, const std::string& name, SitePtr& site) {
  each_tensor(value, [&](const at::Tensor& tensor) {
    if (!tensor.is_cpu() || !tensor.has_storage() || tensor.numel() == 0) return;
    const auto& data = tensor.storage().data_ptr();
    const auto located = locate(data);
    if (!located || !located->pinned) return;
    if (!site && checking()) site = here(name);
    if (use != Argument::Write) note_access(tensor, Kind::Read, kHost, site);
    if (use == Argument::Read) return;
    Extent extent = extent_of(tensor);
    extent.offset += static_cast<const char*>(data.get()) - located->begin;
    source_written(located->block, extent);
    note_access(tensor, Kind::Write, kHost, site);
  });
}

void host_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kHostWatchKey);
  if (!pinned_copies_in_flight() || !watch.load(std::memory_order_relaxed)) {
    c10::impl::tls_set_dispatch_key_included(kHostWatchKey, false);  // the way here costs something
    return op.redispatchBoxed(below, stack);
  }
  const Traits& traits = traits_of(op);
  if (!is_host_kernel(op, below, traits)) return op.redispatchBoxed(below, stack);
  if (!traits.returns_view) {
    SitePtr site;
    const size_t first = stack->size() - traits.arguments.size();
    for (size_t i = 0; i < traits.arguments.size(); ++i)
      if (traits.arguments[i] != Argument::Other) note_host_access((*stack)[first + i], traits.arguments[i], traits.name, site);
  }
  const c10::impl::ExcludeDispatchKeyGuard once(kHostWatchKey);
  op.redispatchBoxed(below, stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&host_kernel>());
}

}  // namespace

void watch_host_kernels() {
  if (watch.load(std::memory_order_relaxed)) c10::impl::tls_set_dispatch_key_included(kHostWatchKey, true);
}

void set_host_watch(bool on) {
  watch.store(on, std::memory_order_relaxed);
}
bool host_watch() {
  return watch.load(std::memory_order_relaxed);
}

}  // namespace sim
