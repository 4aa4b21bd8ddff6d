// The process group for Python: how to make one between processes, and between threads.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "exchange_order.h"
#include "group.h"
#include "runtime.h"
#include "settle.h"
#include "staging.h"

namespace sim {

void register_collectives(pybind11::module_& module);

namespace {

milliseconds in_milliseconds(double seconds) {
  return milliseconds(static_cast<int64_t>(seconds * 1000));
}

c10::intrusive_ptr<SimOptions> options_for(double timeout_s, bool high_priority) {
  auto options = c10::make_intrusive<SimOptions>(in_milliseconds(timeout_s));
  options->is_high_priority_stream = high_priority;
  return options;
}

/// A Python function that is destroyed under the interpreter's lock, whichever thread drops the last copy.
std::shared_ptr<pybind11::function> held_by_interpreter(pybind11::function function) {
  return std::shared_ptr<pybind11::function>(new pybind11::function(std::move(function)), [](pybind11::function* gone) {
    pybind11::gil_scoped_acquire gil;
    delete gone;
  });
}

/// Calls a Python function under the interpreter's lock.
MakeGloo make_gloo(pybind11::function function) {
  const auto held = held_by_interpreter(std::move(function));
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

/// Wraps a Python function of two functions; an exception that it raises becomes a failure of the backend.
Waiter waiter_of(pybind11::function function) {
  namespace py = pybind11;
  const auto kept = held_by_interpreter(std::move(function));
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

/// What the Python function raises is thrown as a failure of the backend.
Watcher watcher_of(pybind11::function function) {
  const auto kept = held_by_interpreter(std::move(function));
  return [kept](const Called& called) {
    std::string failure;
    {
      pybind11::gil_scoped_acquire gil;
      try {
        (*kept)(
            called.op, called.reduction, called.root, called.dtype, called.numel, called.sends, called.takes,
            called.device, called.tag, called.is_paired);
      } catch (pybind11::error_already_set& error) {
        failure = pybind11::str(error.value()).cast<std::string>();
      }
    }
    if (!failure.empty()) {
      C10_THROW_ERROR(DistBackendError, failure);
    }
  };
}

Explainer explainer_of(pybind11::function function) {
  const auto kept = held_by_interpreter(std::move(function));
  return [kept] {
    pybind11::gil_scoped_acquire gil;
    try {
      return (*kept)().cast<std::string>();
    } catch (pybind11::error_already_set& error) {
      error.discard_as_unraisable("explaining a failed collective");
      return std::string();
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
  // With the methods of the base class, and those that c10d expects only of torch's own backends.
  py::class_<SimGroup, c10d::Backend, c10::intrusive_ptr<SimGroup>>(module, "ProcessGroup")
      .def_property_readonly("options", &SimGroup::options)
      .def("allow_sparse", &SimGroup::allow_sparse)
      // Returns a function that makes everything in the group fail, with a reason; it keeps no group alive.
      .def(
          "watch",
          [](const c10::intrusive_ptr<SimGroup>& self, py::function watcher) {
            self->watch(watcher_of(std::move(watcher)));
            return py::cpp_function([weak = c10::weak_intrusive_ptr<SimGroup>(self)](const std::string& reason) {
              if (const auto alive = weak.lock()) {
                alive->abort_because(reason);
              }
            });
          })
      .def_property_readonly("allows_sparse", &SimGroup::allows_sparse)
      .def_property_readonly("has_one_communicator", &SimGroup::has_one_communicator)
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
  module.def("set_failure_explainer", [](std::optional<py::function> explainer) {
    set_failure_explainer(explainer ? explainer_of(std::move(*explainer)) : Explainer());
  });
  module.def("forget_thread_world", &forget_thread_world, py::arg("world"), py::call_guard<py::gil_scoped_release>());
  module.def("deliveries_pending", &deliveries_pending);
  module.def("free_staging", &free_staging);
  // The number of the exchange that is issued next, and the first one that the current stream has not waited for.
  module.def("exchange_order", [](c10::DeviceIndex device) {
    const auto& order = ExchangeOrder::get();
    return py::make_tuple(order.next(), order.waited_for(lane_of(current_stream(device))));
  });
  module.def("waiting", [] {
    const Waiting now = waiting();
    return py::make_tuple(now.main, now.others, now.number);
  });
}

}  // namespace sim
