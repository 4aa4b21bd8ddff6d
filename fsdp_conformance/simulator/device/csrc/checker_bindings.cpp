// The checker for Python: what checker.py and the tests of its semantics need. Does not use torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "checker.h"

namespace py = pybind11;

namespace sim {

void register_checker(py::module_& module);

namespace {

constexpr std::pair<const char*, Mode> kModes[] = {
    {"off", Mode::Off}, {"record", Mode::Record}, {"raise", Mode::Raise}, {"poison", Mode::Poison}};
constexpr std::pair<const char*, Reuse> kReuses[] = {{"exact", Reuse::Exact}, {"worst_case", Reuse::WorstCase}};
constexpr std::pair<const char*, Waits> kWaits[] = {{"all", Waits::All}, {"explicit", Waits::Explicit}};
constexpr std::pair<const char*, Useless> kUseless[] = {
    {"recorded_too_early", Useless::RecordedTooEarly},
    {"other_stream", Useless::OtherStream},
    {"other_device", Useless::OtherDevice},
    {"other_event", Useless::OtherEvent},
    {"waits_too_early", Useless::WaitsTooEarly},
    {"other_waiter", Useless::OtherWaiter}};
constexpr std::pair<const char*, Kind> kKinds[] = {{"read", Kind::Read}, {"write", Kind::Write}};
constexpr std::pair<const char*, HazardKind> kHazardKinds[] = {
    {"read_after_write", HazardKind::ReadAfterWrite},        {"write_after_read", HazardKind::WriteAfterRead},
    {"write_after_write", HazardKind::WriteAfterWrite},      {"reuse_in_flight", HazardKind::ReuseInFlight},
    {"host_write_in_flight", HazardKind::HostWriteInFlight}, {"host_read_in_flight", HazardKind::HostReadInFlight},
    {"uninitialized_read", HazardKind::UninitializedRead}};

template <class Value, size_t N>
Value value_of(const std::pair<const char*, Value> (&table)[N], const std::string& name, const char* what) {
  std::string names;
  for (const auto& [known, value] : table) {
    if (name == known) {
      return value;
    }
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  throw py::value_error(std::string(what) + " must be one of " + names + ", got " + name);
}

template <class Value, size_t N>
std::string name_of(const std::pair<const char*, Value> (&table)[N], Value value) {
  for (const auto& [name, known] : table) {
    if (known == value) {
      return name;
    }
  }
  throw std::logic_error("a value without a name");
}

using Repeats = std::vector<std::pair<int64_t, int64_t>>;

/// A stack supplied by Python: a function without arguments that returns (file, line, function), innermost first.
class PythonStack : public Stack {
 public:
  explicit PythonStack(py::function frames) : frames_(std::move(frames)) {}
  PythonStack(const PythonStack&) = delete;
  PythonStack& operator=(const PythonStack&) = delete;
  ~PythonStack() override {
    const py::gil_scoped_acquire gil;
    frames_ = py::function();
  }

  std::vector<Frame> frames() const override {
    const py::gil_scoped_acquire gil;
    std::vector<Frame> result;
    for (const py::handle& frame : frames_()) {
      auto [file, line, function] = frame.cast<std::tuple<std::string, int64_t, std::string>>();
      result.push_back({std::move(file), line, std::move(function)});
    }
    return result;
  }

 private:
  py::function frames_;
};

// Descriptions have the form of `Hazard.to_json()` (hazard.py).

py::list describe_stack(const SitePtr& site) {
  py::list frames;
  if (site && site->stack) {
    for (const Frame& frame : site->stack->frames()) {
      py::dict described;
      described["file"] = frame.file;
      described["line"] = frame.line;
      described["function"] = frame.function;
      frames.append(described);
    }
  }
  return frames;
}

py::object describe(const SitePtr& site) {
  if (!site) {
    return py::none();
  }
  py::dict result;
  result["op"] = site->op;
  result["label"] = site->label;
  result["tensor"] = site->tensor;
  result["stack"] = describe_stack(site);
  return std::move(result);
}

py::dict describe(const Checker& checker, Lane lane) {
  py::dict result;
  result["device"] = checker.lane_device(lane);
  result["number"] = checker.lane_number(lane);
  result["name"] = checker.lane_name(lane);
  py::list made;
  for (const SitePtr& site : checker.lane_made(lane)) {
    made.append(describe_stack(site));
  }
  result["made"] = made;
  return result;
}

py::dict describe(const Checker& checker, const Access& access) {
  py::dict result;
  result["kind"] = name_of(kKinds, access.kind);
  result["stream"] = describe(checker, access.lane);
  result["offset"] = access.extent.offset;
  result["run"] = access.extent.run;
  result["repeats"] = access.extent.repeats;
  result["allocation"] = access.allocation;
  result["site"] = describe(access.site);
  return result;
}

py::dict describe(const Checker& checker, const UselessWait& wait) {
  py::dict result;
  result["why"] = name_of(kUseless, wait.why);
  result["stream"] = describe(checker, wait.mark.lane);
  result["device"] = wait.mark.device;
  result["recorded"] = describe(wait.mark.site);
  result["waiter"] = describe(checker, wait.waiter);
  result["waited"] = describe(wait.waited);
  return result;
}

py::dict describe(const Checker& checker, const Hazard& hazard) {
  py::dict result;
  result["kind"] = name_of(kHazardKinds, hazard.kind);
  result["then"] = describe(checker, hazard.then);
  result["now"] = describe(checker, hazard.now);
  result["device"] = hazard.device;
  result["pinned"] = hazard.pinned;
  result["block"] = hazard.block;
  result["nbytes"] = hazard.bytes;
  result["allocated"] = describe(hazard.allocated);
  result["freed"] = describe(hazard.freed);
  result["tenant_stream"] = describe(checker, hazard.tenant_lane);
  result["then_block"] = hazard.then_block;
  result["then_nbytes"] = hazard.then_bytes;
  py::list useless_waits;
  for (const UselessWait& wait : hazard.useless_waits) {
    useless_waits.append(describe(checker, wait));
  }
  result["useless_waits"] = useless_waits;
  result["hidden_by"] = describe(hazard.hidden_by);
  result["count"] = hazard.count;
  return result;
}

/// Describing a hazard runs Python (for its stacks), so it happens after the checker's lock is released.
py::list describe_hazards(const Checker& checker) {
  py::list result;
  for (const Hazard& hazard : checker.hazards()) {
    result.append(describe(checker, hazard));
  }
  return result;
}

py::object access(
    Checker& checker, BlockId block, const std::string& kind, Lane lane, int64_t offset, int64_t run, Repeats repeats,
    const std::shared_ptr<Site>& site, bool finished) {
  const Extent extent{offset, run, std::move(repeats)};
  const auto hazard = checker.access(block, value_of(kKinds, kind, "kind"), extent, lane, site, finished);
  return hazard ? py::object(describe(checker, *hazard)) : py::none();
}

}  // namespace

void register_checker(py::module_& module) {
  py::class_<Site, std::shared_ptr<Site>>(module, "Site")
      .def(
          py::init([](std::string op, std::string label, std::string tensor, const py::object& stack) {
            auto site = std::make_shared<Site>();
            site->op = std::move(op);
            site->label = std::move(label);
            site->tensor = std::move(tensor);
            if (!stack.is_none()) {
              site->stack = std::make_shared<PythonStack>(stack.cast<py::function>());
            }
            return site;
          }),
          py::arg("op"), py::arg("label") = "", py::arg("tensor") = "", py::arg("stack") = py::none());

  py::class_<Mark>(module, "Mark");

  using List = std::vector<Repeats::value_type>;
  py::class_<Checker, std::shared_ptr<Checker>> checker(module, "Checker");
  checker
      .def(py::init<>())
      // The process's checker is never destroyed.
      .def_static("get", [] { return std::shared_ptr<Checker>(&Checker::get(), [](Checker*) {}); })
      .def_property(
          "mode", [](const Checker& self) { return name_of(kModes, self.mode()); },
          [](Checker& self, const std::string& mode) { self.set_mode(value_of(kModes, mode, "mode")); })
      .def_property(
          "reuse", [](const Checker& self) { return name_of(kReuses, self.reuse()); },
          [](Checker& self, const std::string& reuse) { self.set_reuse(value_of(kReuses, reuse, "reuse")); })
      .def_property(
          "waits", [](const Checker& self) { return name_of(kWaits, self.waits()); },
          [](Checker& self, const std::string& waits) { self.set_waits(value_of(kWaits, waits, "waits")); })
      .def_property("tracks_unwritten", &Checker::tracks_unwritten, &Checker::track_unwritten)
      .def("add_lane", &Checker::add_lane, py::arg("name"), py::arg("device") = 0)
      .def("lane_name", &Checker::lane_name)
      .def("lane_device", &Checker::lane_device)
      .def("lane_number", &Checker::lane_number)
      .def("rename_lane", &Checker::rename_lane)
      .def(
          "set_lane_made",
          [](Checker& self, Lane lane, const std::vector<std::shared_ptr<Site>>& sites) {
            self.set_lane_made(lane, {sites.begin(), sites.end()});
          })
      .def("num_lanes", &Checker::num_lanes)
      .def("submit", &Checker::submit)
      .def("snapshot", &Checker::snapshot)
      .def("record", &Checker::record)
      .def("known_here", &Checker::known_here)
      .def("learn", &Checker::learn)
      .def("begin_host_thread", &Checker::begin_host_thread)
      .def("end_host_thread", &Checker::end_host_thread)
      .def("only_this_host_thread", &Checker::only_this_host_thread)
      .def("wait", &Checker::wait)
      .def("host_wait", &Checker::host_wait)
      .def(
          "host_wait_lane",
          [](Checker& self, Lane lane, const std::shared_ptr<Site>& implicit) {
            return self.host_wait_lane(lane, implicit);
          },
          py::arg("lane"), py::arg("implicit") = nullptr)
      .def("host_wait_device", &Checker::host_wait_device)
      .def("host_knows", &Checker::host_knows)
      .def(
          "mark",
          [](Checker& self, Lane lane, const std::shared_ptr<Site>& site, int32_t device) {
            return self.mark(lane, site, device);
          },
          py::arg("lane"), py::arg("site") = nullptr, py::arg("device") = -1)
      .def(
          "note_wait",
          [](Checker& self, Lane lane, const Clock& clock, const Mark& mark, const std::shared_ptr<Site>& waited) {
            self.note_wait(lane, clock, mark, waited);
          })
      .def("add_block", &Checker::add_block, py::arg("nbytes"), py::arg("device") = 0, py::arg("pinned") = false)
      .def("remove_block", &Checker::remove_block)
      .def("resize_block", &Checker::resize_block)
      .def(
          "allocated",
          [](Checker& self, BlockId block, Lane lane, const std::shared_ptr<Site>& site, bool written) {
            self.allocated(block, lane, site, written);
          },
          py::arg("block"), py::arg("lane"), py::arg("site") = nullptr, py::arg("written") = true)
      .def(
          "freed", [](Checker& self, BlockId block, const std::shared_ptr<Site>& site) { self.freed(block, site); },
          py::arg("block"), py::arg("site") = nullptr)
      .def("record_stream", &Checker::record_stream)
      .def(
          "access", &access, py::arg("block"), py::arg("kind"), py::arg("lane"), py::arg("offset"), py::arg("run"),
          py::arg("repeats") = List{}, py::arg("site") = nullptr, py::arg("finished") = false)
      .def_static("suspend", &Checker::suspend)
      .def_static("resume", &Checker::resume)
      .def_static("suspended", &Checker::suspended)
      .def("hazards", &describe_hazards)
      .def("num_hazards", &Checker::num_hazards)
      .def("clear_hazards", &Checker::clear_hazards, py::arg("device") = py::none())
      .def("clear_history", &Checker::clear_history, py::arg("device") = py::none())
      .def("accesses", &Checker::accesses)
      .def("begin_order_digest", &Checker::begin_order_digest)
      .def("order_digest", &Checker::order_digest, py::arg("device") = 0)
      .def("history_size", py::overload_cast<BlockId>(&Checker::history_size, py::const_))
      .def("history_size", py::overload_cast<>(&Checker::history_size, py::const_));
  checker.attr("HOST") = kHost;

  module.def(
      "overlap",
      [](int64_t offset_a, int64_t run_a, Repeats repeats_a, int64_t offset_b, int64_t run_b, Repeats repeats_b) {
        return overlap({offset_a, run_a, std::move(repeats_a)}, {offset_b, run_b, std::move(repeats_b)});
      });
  module.def("normalized", [](int64_t offset, int64_t run, Repeats repeats) {
    const Extent extent = normalized({offset, run, std::move(repeats)});
    return py::make_tuple(extent.offset, extent.run, extent.repeats);
  });
}

}  // namespace sim
