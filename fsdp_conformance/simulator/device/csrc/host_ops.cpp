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

thread_local int not_watched = 0;

/// Whether this call runs a CPU kernel: not a composite operation, not for another device, and not for a tensor that
/// Python dispatches.
bool is_host_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const Traits& traits) {
  if (!keys.has_backend(c10::BackendComponent::CPUBit) || keys.has_backend(c10::BackendComponent::PrivateUse1Bit) ||
      keys.has(c10::DispatchKey::Python)) {
    return false;
  }
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || starts_with(traits.name, "aten::copy_");
}

void note_host_access(const c10::IValue& value, Usage use, const std::string& name, SitePtr& site) {
  each_tensor(value, [&](const at::Tensor& tensor) {
    if (!tensor.is_cpu() || !tensor.has_storage() || tensor.numel() == 0) {
      return;
    }
    const auto& data = tensor.storage().data_ptr();
    const auto located = locate(data);
    if (!located || !located->pinned) {
      return;
    }
    if (!site && checking()) {
      site = here(name);
    }
    expose_pinned(tensor);
    if (use != Usage::Write) {
      note_access(tensor, Kind::Read, kHost, site);
    }
    if (use == Usage::Read) {
      return;
    }
    Extent extent = extent_of(tensor);
    extent.offset += static_cast<const char*>(data.get()) - located->begin;
    source_written(located->block, extent);
    note_access(tensor, Kind::Write, kHost, site);
  });
}

void note_host_accesses(const Traits& traits, c10::ArrayRef<c10::IValue> arguments) {
  if (traits.returns_view || arguments.size() < traits.arguments.size()) {
    return;
  }
  SitePtr site;
  for (size_t i = 0; i < traits.arguments.size(); ++i) {
    if (traits.arguments[i] != Usage::Other) {
      note_host_access(arguments[i], traits.arguments[i], traits.name, site);
    }
  }
}

thread_local std::string to_raise;  // an error that the observer found and could not raise

void host_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (!to_raise.empty()) {
    TORCH_CHECK(false, std::exchange(to_raise, {}));
  }
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kHostWatchKey);
  if (!pinned_copies_in_flight() || !watch.load(std::memory_order_relaxed)) {
    c10::impl::tls_set_dispatch_key_included(kHostWatchKey, false);  // the detour through here is not free
    return op.redispatchBoxed(below, stack);
  }
  const Traits& traits = traits_of(op);
  if (!is_host_kernel(op, below, traits)) {
    return op.redispatchBoxed(below, stack);
  }
  const size_t count = traits.arguments.size();
  note_host_accesses(traits, c10::ArrayRef<c10::IValue>(stack->data() + (stack->size() - count), count));
  const NotWatched once;
  op.redispatchBoxed(below, stack);
}

/// Until the kernel has finished: what it calls is part of it.
struct InKernel : at::ObserverContext {
  NotWatched not_watched;
};

/// Sees what bypasses `host_kernel`: a thread's first operation after copies have started, and operations that Python
/// dispatches, for which torch excludes every key above Python's.
std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& function) {
  const bool excluded = c10::impl::tls_is_dispatch_key_excluded(kHostWatchKey);
  if (not_watched > 0 || (c10::impl::tls_is_dispatch_key_included(kHostWatchKey) && !excluded) ||
      !watch.load(std::memory_order_relaxed) || !pinned_copies_in_flight()) {
    return nullptr;
  }
  if (!excluded) {
    watch_host_kernels();
  }
  const auto name = function.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!op) {
    return nullptr;
  }
  c10::DispatchKeySet keys;
  for (const auto& input : function.inputs()) {
    each_tensor(input, [&](const at::Tensor& tensor) { keys = keys | tensor.key_set(); });
  }
  const auto local = c10::impl::tls_local_dispatch_key_set();
  keys = (keys | local.included_) - local.excluded_;
  const Traits& traits = traits_of(*op);
  if (!is_host_kernel(*op, keys, traits)) {
    return nullptr;
  }
  try {
    note_host_accesses(traits, c10::ArrayRef<c10::IValue>(function.inputs().data(), function.inputs().size()));
  } catch (const c10::Error& error) {
    to_raise = error.what_without_backtrace();
  }
  return excluded ? std::make_unique<InKernel>() : nullptr;
}

std::atomic<at::CallbackHandle> observer{at::INVALID_CALLBACK_HANDLE};

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&host_kernel>());
}

}  // namespace

NotWatched::NotWatched() {
  ++not_watched;
}
NotWatched::~NotWatched() {
  --not_watched;
}

void watch_host_kernels() {
  if (watch.load(std::memory_order_relaxed)) {
    c10::impl::tls_set_dispatch_key_included(kHostWatchKey, true);
  }
}

void register_host_watch() {
  observer =
      at::addGlobalCallback(at::RecordFunctionCallback(&observe).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  at::disableCallback(observer);
}

void watch_all_threads(bool on) {
  const auto handle = observer.load();
  if (handle == at::INVALID_CALLBACK_HANDLE) {
    return;
  }
  if (on) {
    at::reenableCallback(handle);
  } else {
    at::disableCallback(handle);
  }
}

void set_host_watch(bool on) {
  watch.store(on, std::memory_order_relaxed);
}
bool host_watch() {
  return watch.load(std::memory_order_relaxed);
}

}  // namespace sim
