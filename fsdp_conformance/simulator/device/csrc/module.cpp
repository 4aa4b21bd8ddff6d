// The Python module: the functions under torch.sim, the checker and the process group.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>

#include "allocator.h"
#include "cpu_only.h"
#include "cuda_names.h"
#include "fallback.h"
#include "generator.h"
#include "host_ops.h"
#include "outcomes.h"
#include "pinned.h"
#include "runtime.h"
#include "sync_debug.h"
#include "traits.h"

namespace py = pybind11;

namespace sim {

void register_checker(py::module_& module);
// Weak, so that the device can be built without collectives.
__attribute__((weak)) void register_collectives(py::module_& module);
void register_device();
void register_autocast();
void bind_classes(py::module_& module);
void register_whole();
/// Which of CUDA's kernels a program may use for these inputs: flash attention, the memory-efficient one, cuDNN's.
std::array<bool, 3> attention_kernels(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    bool is_causal, bool enable_gqa);

namespace {

/// Wraps a Python filter, which is called and destroyed under the interpreter's lock.
WaitFilter filter_of(py::function function) {
  auto* held = new py::function(std::move(function));
  const std::shared_ptr<py::function> shared(held, [](py::function* gone) {
    py::gil_scoped_acquire gil;
    delete gone;
  });
  return [shared](Wait wait, c10::Stream stream) {
    py::gil_scoped_acquire gil;
    return (*shared)(name_of(wait), stream.id(), static_cast<int>(stream.device_index())).cast<bool>();
  };
}

py::dict dict_of(const MemoryStats& stats) {
  py::dict all;
  all["allocated"] = stats.allocated;
  all["peak_allocated"] = stats.peak_allocated;
  all["reserved"] = stats.reserved;
  all["peak_reserved"] = stats.peak_reserved;
  all["total_allocated"] = stats.total_allocated;
  all["total_freed"] = stats.total_freed;
  all["num_allocations"] = stats.num_allocations;
  all["peak_num_allocations"] = stats.peak_num_allocations;
  all["total_num_allocations"] = stats.total_num_allocations;
  all["total_num_frees"] = stats.total_num_frees;
  all["num_alloc_retries"] = stats.num_alloc_retries;
  all["num_ooms"] = stats.num_ooms;
  return all;
}

/// Register the device with torch. Until then only the checker can be used, and the kernels in torch are unreachable.
void activate() {
  static const bool once = [] {
    register_device();
    register_fallbacks();
    register_autocast();
    register_whole();
    register_host_watch();
    return true;
  }();
  (void)once;
}

void bind_device(py::module_& module) {
  module.def("activate", &activate);
  module.def("num_devices", [] { return static_cast<int>(num_devices()); });
  module.def("set_num_devices", &set_num_devices, py::arg("count"));
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_current_device", [](int device) { set_current_device(static_cast<c10::DeviceIndex>(device)); });
  module.def(
      "current_stream_id", [](int device) { return current_stream(static_cast<c10::DeviceIndex>(device)).id(); });
  module.def("set_current_stream", [](int64_t id, int device) {
    set_current_stream(c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, static_cast<c10::DeviceIndex>(device)), id));
  });
  module.def("priority_of", [](int64_t id) {
    return priority_of(c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, 0), id));
  });
  module.def("lane_of", [](int64_t id, int device) {
    return lane_of(c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, static_cast<c10::DeviceIndex>(device)), id));
  });
  module.def("elapsed_time", [](intptr_t first, intptr_t second) {
    return elapsed_time(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second));
  });
  module.def("host_waits_device", [](int device) { host_waits_device(static_cast<c10::DeviceIndex>(device)); });
  module.def("set_wait_filter", [](std::optional<py::function> filter) {
    set_wait_filter(filter ? filter_of(std::move(*filter)) : WaitFilter());
  });
  module.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
  module.def("set_ordering_only", &set_ordering_only);
  module.def("ordering_only", &ordering_only);
  module.def("set_separate_generators", &set_separate_generators);
  module.def("separate_generators", &separate_generators);
}

void bind_memory(py::module_& module) {
  module.def("memory_stats", [](int device) { return dict_of(memory_stats(static_cast<c10::DeviceIndex>(device))); });
  module.def(
      "reset_peak_memory_stats", [](int device) { reset_peak_memory_stats(static_cast<c10::DeviceIndex>(device)); });
  module.def("reset_accumulated_memory_stats", [](int device) {
    reset_accumulated_memory_stats(static_cast<c10::DeviceIndex>(device));
  });
  module.def("memory_info", [](int device) { return memory_info(static_cast<c10::DeviceIndex>(device)); });
  module.def("empty_cache", [] { empty_cache(); });
  module.def("name_tensor", [](const at::Tensor& tensor, std::string name) { name_tensor(tensor, std::move(name)); });
  module.def("block_of", [](const at::Tensor& tensor) -> std::optional<BlockId> {
    const auto located = locate(tensor.storage().data_ptr());
    return located ? std::optional<BlockId>(located->block) : std::nullopt;
  });
}

/// For checking operations that run elsewhere.
void bind_operations(py::module_& module) {
  // The bytes of a tensor within its storage.
  module.def("extent_of", [](const at::Tensor& tensor) {
    const Extent extent = extent_of(tensor);
    return py::make_tuple(extent.offset, extent.run, extent.repeats);
  });
  // For each argument of an operation, if its tensors are read and if they are written; nothing if it returns a view.
  module.def("usages", [](const std::string& name, const std::string& overload) {
    std::vector<std::pair<bool, bool>> usages;
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const Traits& traits = traits_of(op);
    if (!traits.returns_view) {
      for (const Usage usage : traits.arguments) {
        usages.emplace_back(
            usage == Usage::Read || usage == Usage::ReadWrite, usage == Usage::Write || usage == Usage::ReadWrite);
      }
    }
    return usages;
  });
}

void bind_sites(py::module_& module) {
  module.def("set_cuda_names", &set_cuda_names);
  module.def("attention_kernels", &attention_kernels);
  module.def("add_cpu_only", &add_cpu_only);
  module.def("clear_cpu_only", &clear_cpu_only);
  module.def("set_sync_debug_mode", &set_sync_debug_mode);
  module.def("sync_debug_mode", &sync_debug_mode);
  module.def("set_tracing", &set_tracing);
  module.def("tracing", &tracing);
  module.def("set_label", &set_label);
  module.def("label", &label);
  module.def("here", [](const std::string& op) { return std::const_pointer_cast<Site>(here(op)); });
  module.def("begin_backward", &begin_backward);
  module.def("end_backward", &end_backward);
  module.def("set_host_watch", &set_host_watch);
  module.def("host_watch", &host_watch);
  // A suspended thread sees what the device has computed, whether or not the host has waited for it.
  module.def("suspend", [] {
    Checker::suspend();
    reveal_pinned();
  });
  module.def("resume", [] {
    hide_pinned();
    Checker::resume();
  });
  module.def("pinned_copies_in_flight", &pinned_copies_in_flight);
  module.def("note_touches", [] { note_touches(/*may_raise=*/false); });
  // A process group of the CPU reads or writes a pinned tensor.
  module.def("note_host_access", [](const at::Tensor& tensor, bool writes, const std::string& op) {
    expose_pinned(tensor);
    note_access(tensor, writes ? Kind::Write : Kind::Read, kHost, here(op));
  });
  // A kernel that torch does not see has run on the current stream. Returns whether an access has raced in the mode in
  // which that makes values NaN.
  module.def(
      "note_kernel",
      [](const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, const std::string& op) {
        const auto& any = reads.empty() ? writes : reads;
        if (any.empty()) {
          return false;
        }
        const auto stream = current_stream(any[0].device().index());
        const SitePtr site = checking() ? here(op) : nullptr;
        Checker::get().submit(lane_of(stream));
        bool poisoned = false;
        for (const auto& tensor : reads) {
          poisoned |= note_access(tensor, Kind::Read, stream, site);
        }
        for (const auto& tensor : writes) {
          poisoned |= note_access(tensor, Kind::Write, stream, site);
        }
        return poisoned;
      });
  module.def("set_memory_limit", &set_memory_limit, py::arg("nbytes"));
}

}  // namespace

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  sim::bind_device(module);
  sim::bind_memory(module);
  sim::bind_sites(module);
  sim::bind_operations(module);
  sim::bind_classes(module);
  sim::register_checker(module);
  if (sim::register_collectives != nullptr) {
    sim::register_collectives(module);
  }
}
