// Operations with a kernel of the device's own: memory, copies, views, and operations that wait for the device.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "allocator.h"
#include "fallback.h"
#include "host_ops.h"
#include "pinned.h"
#include "runtime.h"
#include "sync_debug.h"
#include "uninitialized.h"

namespace sim {

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

/// Sets the current device for its lifetime.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex device) : before_(current_device()) {
    set_current_device(device);
  }
  ~OnDevice() {
    set_current_device(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex before_;
};

bool pinned(const at::Tensor& tensor) {
  const auto located = locate(tensor.storage().data_ptr());
  return located && located->pinned;
}

// Memory.

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "pin_memory must be False on sim: only tensors on the CPU can be pinned");
  const OnDevice on(index_of(device.value_or(c10::Device(kSim))));
  const SitePtr site = checking() ? here("aten::empty") : nullptr;
  const Operation operation(site ? &site : Operation::current());
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "pin_memory must be False on sim: only tensors on the CPU can be pinned");
  const OnDevice on(index_of(device.value_or(c10::Device(kSim))));
  const SitePtr site = checking() ? here("aten::empty_strided") : nullptr;
  const Operation operation(site ? &site : Operation::current());
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

/// Zeros without memory, which torch uses in forward-mode derivatives.
at::Tensor efficient_zeros(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device, std::optional<bool> /*pin_memory*/) {
  struct Nothing final : c10::Allocator {
    c10::DataPtr allocate(size_t /*nbytes*/) override {
      return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kSim, current_device())};
    }
    void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*count*/) const override {}
  };
  static auto* nothing = new Nothing();
  const OnDevice on(index_of(device.value_or(c10::Device(kSim))));
  return at::detail::empty_generic(
      size, nothing, kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor), c10::dtype_or_default(dtype),
      std::nullopt);
}

void grow(c10::TensorImpl* tensor) {
  const auto needed = at::detail::computeStorageNbytes(
      tensor->sizes(), tensor->strides(), tensor->dtype().itemsize(), static_cast<size_t>(tensor->storage_offset()));
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (needed <= storage->nbytes()) {
    return;
  }
  const OnDevice on(tensor->device().index());
  resize_bytes(storage, needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> memory_format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    grow(impl);
  }
  if (memory_format) {
    TORCH_CHECK(*memory_format != at::MemoryFormat::Preserve, "memory_format must not be preserve [resize_]");
    impl->empty_tensor_restride(*memory_format);
  }
  return self;
}

at::Tensor& set_storage_(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr && !(stride.empty() && !size.empty())) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  if (self.numel() > 0) {
    grow(impl);
  }
  return self;
}

at::Tensor& set_tensor_(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) {
    return self;
  }
  return set_storage_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing_(at::Tensor& self) {
  const OnDevice on(self.device().index());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage_(self, std::move(storage), 0, {0}, {});
}

// Views: the CPU's functions touch no memory.

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}
at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
at::Tensor view_as_real(const at::Tensor& self) {
  return at::native::view_as_real(self);
}
at::Tensor view_as_complex(const at::Tensor& self) {
  return at::native::view_as_complex(self);
}

// Copies.

/// torch's copies keep pinned memory from being reused while they run.
void record_stream_of_copy(const at::Tensor& tensor, c10::Stream stream) {
  if (const auto located = locate(tensor.storage().data_ptr())) {
    Checker::get().record_stream(located->block, lane_of(stream));
  }
}

void copy_on_host(const at::Tensor& to, const at::Tensor& from) {
  const OnHost on_host;
  to.copy_(from);
}

void copy_within_device(const at::Tensor& self, const at::Tensor& src) {
  const c10::Stream from = current_stream(src.device().index());
  const c10::Stream to = current_stream(self.device().index());
  Checker& checker = Checker::get();
  bool spoilt = false;
  mark_written(self);
  if (checking()) {
    const auto unset = unset_of(src);
    // A copy between devices runs on the source's stream, and the two streams wait for each other, as on CUDA.
    const bool across = from.device_index() != to.device_index();
    const SitePtr site = here(across ? "copy between devices" : "aten::copy_");
    if (across) {
      checker.wait(lane_of(from), checker.snapshot(lane_of(to)));
    }
    checker.submit(lane_of(from));
    spoilt = note_access(src, Kind::Read, from, site);
    spoilt |= note_access(self, Kind::Write, from, site);
    if (unset) {
      spread(*unset, self, Flow::Elementwise);
    }
    if (across) {
      checker.wait(lane_of(to), checker.snapshot(lane_of(from)));
    }
  }
  copy_on_host(host_view(self), host_view(src));
  if (spoilt) {
    poison(self);
  }
}

void copy_to_host(const at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  const c10::Stream stream = current_stream(src.device().index());
  const bool to_pinned = pinned(self);
  // Without pinned memory the call is blocking, whatever non_blocking says.
  const bool blocking = !non_blocking || !to_pinned;
  if (blocking) {
    warn_or_fail_on_sync();
  }
  if (!checking()) {
    return copy_on_host(self, host_view(src));
  }
  const SitePtr site = here("copy to the host");
  Checker::get().submit(lane_of(stream));
  bool spoilt = note_access(src, Kind::Read, stream, site, blocking);
  if (const auto unset = unset_of(src); unset && unset->all) {
    spoilt |= note_use(src, *unset, lane_of(stream), site);
  }
  if (to_pinned) {
    spoilt |= note_access(self, Kind::Write, stream, site, blocking);
  }
  if (!blocking) {
    at::Tensor value =
        at::empty(self.sizes(), self.options().pinned_memory(false).memory_format(c10::MemoryFormat::Contiguous));
    copy_on_host(value, host_view(src));
    if (spoilt) {
      poison(value);
    }
    record_stream_of_copy(self, stream);
    copy_to_pinned(self, value, stream);
    return;
  }
  // The wait comes first: it may complete earlier copies into the same memory.
  host_waits_stream(stream, site);
  expose_pinned(self);
  copy_on_host(self, host_view(src));
  if (spoilt) {
    poison(self);
  }
}

void copy_to_device(const at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (!non_blocking) {
    warn_or_fail_on_sync();
  }
  const c10::Stream stream = current_stream(self.device().index());
  const bool from_pinned = pinned(src);
  const at::Tensor contents = from_pinned ? contents_of_pinned(src) : src;
  bool spoilt = false;
  SitePtr site;
  mark_written(self);
  if (checking()) {
    site = here("copy to the device");
    Checker::get().submit(lane_of(stream));
    if (from_pinned) {
      spoilt |= note_access(src, Kind::Read, stream, site, !non_blocking);
    }
    spoilt |= note_access(self, Kind::Write, stream, site, !non_blocking);
    if (from_pinned && non_blocking) {
      record_stream_of_copy(src, stream);
      copy_from_pinned(src, contents, stream, site);
    }
  }
  copy_on_host(host_view(self), contents);
  if (spoilt) {
    poison(self);
  }
  // If the source is not pinned, the driver takes its contents immediately, but need not wait for the stream.
  if (!non_blocking) {
    host_waits_stream(stream, site);
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.is_same(src)) {
    return self;
  }
  const auto expanded = at::expand_inplace(self, src, "copy_");
  if (self.numel() == 0) {
    return self;
  }
  if (on_sim(self) && on_sim(src)) {
    copy_within_device(self, *expanded);
  } else if (on_sim(src)) {
    copy_to_host(self, *expanded, non_blocking);
  } else {
    copy_to_device(self, *expanded, non_blocking);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor to = target;
  return copy_(to, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  at::Tensor to = target;
  return copy_(to, self, false);
}

// Operations that the host waits for.

at::Scalar local_scalar_dense(const at::Tensor& self) {
  warn_or_fail_on_sync();
  bool spoilt = false;
  if (checking()) {
    const c10::Stream stream = current_stream(self.device().index());
    const SitePtr site = here("aten::item");
    Checker::get().submit(lane_of(stream));
    spoilt = note_access(self, Kind::Read, stream, site, true);
    if (const auto unset = unset_of(self)) {
      spoilt |= note_use(self, *unset, lane_of(stream), site);
    }
    host_waits_stream(stream, site);
  }
  const OnHost on_host;
  at::Tensor host = host_view(self);
  if (spoilt) {
    host = host.clone();
    poison(host);
  }
  return at::_local_scalar_dense(host);
}

void record_tensor_stream(at::Tensor& self, at::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

bool has_compatible_shallow_copy_type(const at::Tensor& /*self*/, const at::Tensor& /*from*/) {
  return true;  // `parameter.data = parameter.to("sim")` keeps the parameter, as it does on CUDA
}

/// False, so that nn.TransformerEncoder pads instead of making nested tensors, which the device does not support.
bool makes_no_nested_tensor(const at::Tensor& /*tensor*/, const at::Tensor& /*mask*/) {
  return false;
}

// Operations for which torch would compute other numbers than on the CPU.

/// The CPU's dropout. For an accelerator torch would use native_dropout, which rounds the scale once more.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) {
    return input;
  }
  if (p == 1) {
    return input.mul(at::zeros({}, input.options()));
  }
  at::Tensor noise = at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
  return input.mul(noise);
}
at::Tensor& dropout_(at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) {
    return input;
  }
  if (p == 1) {
    return input.mul_(at::zeros({}, input.options()));
  }
  at::Tensor noise = at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
  return input.mul_(noise);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("_efficientzerotensor", TORCH_FN(efficient_zeros));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_));
  library.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor_));
  library.impl("set_", TORCH_FN(set_nothing_));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("view", TORCH_FN(view));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
  library.impl("unfold", TORCH_FN(unfold));
  library.impl("view_as_real", TORCH_FN(view_as_real));
  library.impl("view_as_complex", TORCH_FN(view_as_complex));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  library.impl("record_stream", TORCH_FN(record_tensor_stream));
  library.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  library.impl("_nested_tensor_from_mask_left_aligned", TORCH_FN(makes_no_nested_tensor));
  library.impl("dropout", TORCH_FN(dropout));
  library.impl("dropout_", TORCH_FN(dropout_));
}

// torch has composite kernels for these, so autograd's key needs them too.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  library.impl("dropout", TORCH_FN(dropout));
  library.impl("dropout_", TORCH_FN(dropout_));
}

/// Lets operations without a derivative, such as c10d's collectives, go on to the device. Torch registers this for its
/// own devices, and not for PrivateUse1 in 2.8 and older.
void register_autograd_fallback() {
  constexpr auto key = c10::DispatchKey::AutogradPrivateUse1;
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(key)) {
    static torch::Library library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
    library.fallback(torch::autograd::basicAutogradNotImplementedFallback());
  }
}

const bool autograd_fallback_registered = (register_autograd_fallback(), true);

}  // namespace sim
