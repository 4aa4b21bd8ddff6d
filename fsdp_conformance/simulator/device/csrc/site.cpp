// The site of an operation: its label, the autograd node that runs it, and the Python stack.
#include <Python.h>

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <atomic>
#include <mutex>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "runtime.h"

namespace sim {

namespace {

std::atomic<bool> trace{true};

/// What autograd's threads inherit from the thread that they work for.
struct Caller {
  std::mutex mutex;
  std::string label;
  std::shared_ptr<const Stack> backward;  // where it called backward
  const HostThread host = Checker::host_thread();

  std::string get_label() {
    std::lock_guard<std::mutex> lock(mutex);
    return label;
  }
  std::shared_ptr<const Stack> get_backward() {
    std::lock_guard<std::mutex> lock(mutex);
    return backward;
  }
};

thread_local std::shared_ptr<Caller> own_caller;

// torch passes Python objects under such keys on to autograd's threads for the duration of a backward pass.
const std::string& caller_key() {
  static const auto* key = new std::string("fsdp_conformance.simulator.caller");
  return *key;
}
constexpr const char* kCapsule = "fsdp_conformance.simulator.caller";

void destroy_caller(PyObject* capsule) {
  delete static_cast<std::shared_ptr<Caller>*>(PyCapsule_GetPointer(capsule, kCapsule));
}

/// Call it with the interpreter's lock.
Caller& make_own_caller() {
  if (!own_caller) {
    own_caller = std::make_shared<Caller>();
    PyObject* capsule = PyCapsule_New(new std::shared_ptr<Caller>(own_caller), kCapsule, &destroy_caller);
    at::impl::ThreadLocalPythonObjects::set(
        caller_key(), std::make_shared<c10::SafePyObject>(capsule, getPyInterpreter()));
  }
  return *own_caller;
}

/// The Caller of the thread that this one works for; null if there is none.
std::shared_ptr<Caller> inherited_caller() {
  if (!at::impl::ThreadLocalPythonObjects::contains(caller_key())) {
    return nullptr;
  }
  auto* capsule = at::impl::ThreadLocalPythonObjects::get(caller_key())->ptr(getPyInterpreter());
  auto caller = *static_cast<std::shared_ptr<Caller>*>(PyCapsule_GetPointer(capsule, kCapsule));
  return caller == own_caller ? nullptr : caller;
}

std::string label_here(const std::shared_ptr<Caller>& inherited) {
  if (own_caller) {
    if (auto text = own_caller->get_label(); !text.empty()) {
      return text;
    }
  }
  return inherited ? inherited->get_label() : std::string();
}

/// Code objects and instructions of the frames, captured as for torch's memory snapshots.
struct PythonStack final : Stack {
  std::shared_ptr<torch::CapturedTraceback> gathered;
  std::shared_ptr<const Stack> outer;  // for autograd's threads: where backward was called; else null

  PythonStack(std::shared_ptr<torch::CapturedTraceback> gathered, std::shared_ptr<const Stack> outer)
      : gathered(std::move(gathered)), outer(std::move(outer)) {}

  std::vector<Frame> frames() const override {
    std::vector<Frame> result;
    const auto symbolized = torch::symbolize({gathered.get()});
    for (const auto index : symbolized.tracebacks.at(0)) {
      const auto& frame = symbolized.all_frames.at(index);
      result.push_back({frame.filename, static_cast<int64_t>(frame.lineno), frame.funcname});
    }
    if (outer) {
      for (auto& frame : outer->frames()) {
        result.push_back(std::move(frame));
      }
    }
    return result;
  }
};

/// The stack of an operation that must not wait for the interpreter's lock: that of its thread's next operation.
struct LaterStack final : Stack {
  mutable std::mutex mutex;
  std::shared_ptr<const Stack> stack;

  std::vector<Frame> frames() const override {
    std::shared_ptr<const Stack> filled;
    {
      std::lock_guard<std::mutex> lock(mutex);
      filled = stack;
    }
    return filled ? filled->frames() : std::vector<Frame>();
  }
  void fill(std::shared_ptr<const Stack> filled) {
    std::lock_guard<std::mutex> lock(mutex);
    stack.swap(filled);
  }
};

constexpr size_t kMostUnfilled = 1024;
thread_local std::vector<std::weak_ptr<LaterStack>> unfilled;

std::shared_ptr<const Stack> later() {
  if (!trace.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  if (unfilled.size() == kMostUnfilled) {
    unfilled.clear();  // a thread that only frees memory
  }
  auto stack = std::make_shared<LaterStack>();
  unfilled.push_back(stack);
  return stack;
}

void fill_unfilled(const std::shared_ptr<const Stack>& stack) {
  for (const auto& waiting : unfilled) {
    if (const auto alive = waiting.lock()) {
      alive->fill(stack);
    }
  }
  unfilled.clear();
}

bool interpreter_runs() {
  if (!Py_IsInitialized()) {
    return false;
  }
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsFinalizing();
#else
  return !_Py_IsFinalizing();
#endif
}

/// Takes the interpreter's lock.
std::shared_ptr<const Stack> gather(const std::shared_ptr<Caller>& inherited) {
  if (!trace.load(std::memory_order_relaxed) || !interpreter_runs()) {
    return nullptr;
  }
  auto gathered = torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
  auto stack =
      std::make_shared<const PythonStack>(std::move(gathered), inherited ? inherited->get_backward() : nullptr);
  if (!unfilled.empty()) {
    fill_unfilled(stack);
  }
  return stack;
}

/// The stack of an operation as text.
struct ReadStack final : Stack {
  std::vector<Frame> read;

  explicit ReadStack(std::vector<Frame> read) : read(std::move(read)) {}
  std::vector<Frame> frames() const override {
    return read;
  }
};

#if PY_VERSION_HEX < 0x030D0000

// A thread that has released the interpreter's lock still has its frames, and nothing changes them before it runs
// Python again. They can be read without the lock if no reference is counted: so they are read as text at once. The
// layout of a frame is private to CPython; it is that of 3.11 and 3.12. In other versions the stack is that of the
// thread's next operation.
struct InterpreterFrame {
#if PY_VERSION_HEX < 0x030C0000
  PyObject* function;
  PyObject* globals;
  PyObject* builtins;
  PyObject* locals;
  PyCodeObject* code;
  PyObject* object;
  InterpreterFrame* previous;
  char* before_next;  // the instruction before the next one
  int stacktop;
  bool is_entry;
  char owner;
#else
  PyCodeObject* code;
  InterpreterFrame* previous;
  PyObject* function;
  PyObject* globals;
  PyObject* builtins;
  PyObject* locals;
  PyObject* object;
  char* before_next;
  int stacktop;
  uint16_t return_offset;
  char owner;
#endif
};
constexpr char kOwnedByGenerator = 1;
constexpr char kOwnedByC = 3;
constexpr size_t kMostFrames = 64;

/// A Python string as UTF-8.
std::string utf8_of(PyObject* text) {
  if (text == nullptr || !PyUnicode_Check(text)) {
    return {};
  }
  if (PyUnicode_IS_COMPACT_ASCII(text)) {
    return {static_cast<const char*>(PyUnicode_DATA(text)), static_cast<size_t>(PyUnicode_GET_LENGTH(text))};
  }
  std::string result;
  for (Py_ssize_t i = 0; i < PyUnicode_GET_LENGTH(text); ++i) {
    const Py_UCS4 point = PyUnicode_READ_CHAR(text, i);
    if (point < 0x80) {
      result += static_cast<char>(point);
      continue;
    }
    const int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    result += static_cast<char>((more == 1 ? 0xC0 : more == 2 ? 0xE0 : 0xF0) | (point >> (6 * more)));
    for (int j = more - 1; j >= 0; --j) {
      result += static_cast<char>(0x80 | ((point >> (6 * j)) & 0x3F));
    }
  }
  return result;
}

/// The stack of this thread, which does not hold the interpreter's lock; null if it runs no Python.
std::shared_ptr<const Stack> read_without_lock() {
  const PyThreadState* state = interpreter_runs() ? PyGILState_GetThisThreadState() : nullptr;
  if (state == nullptr || state->cframe == nullptr || !trace.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  std::vector<Frame> frames;
  const auto* frame = reinterpret_cast<const InterpreterFrame*>(state->cframe->current_frame);
  for (; frame != nullptr && frames.size() < kMostFrames; frame = frame->previous) {
    if (frame->owner == kOwnedByC) {
      continue;
    }
    PyCodeObject* code = frame->code;
    const auto* begin = reinterpret_cast<const char*>(code->co_code_adaptive);
    const auto offset = frame->before_next - begin;
    if (frame->owner != kOwnedByGenerator && offset < code->_co_firsttraceable * 2) {
      continue;  // has not begun
    }
    frames.push_back(
        {utf8_of(code->co_filename), PyCode_Addr2Line(code, static_cast<int>(offset)), utf8_of(code->co_name)});
  }
  return frames.empty() ? nullptr : std::make_shared<const ReadStack>(std::move(frames));
}

#else

std::shared_ptr<const Stack> read_without_lock() {
  return nullptr;
}

#endif

/// The autograd node that this thread is evaluating; empty if there is none. Only Python's own nodes need the
/// interpreter's lock.
std::string node_name(bool may_wait) {
  const auto node = torch::autograd::get_current_node();
  if (!node) {
    return {};
  }
  const torch::autograd::Node& evaluated = *node;
  const auto& type = typeid(evaluated);
  // Demangling costs more than an operation. A Python node asks its class for the name, so it cannot be cached by type.
  thread_local std::unordered_map<const char*, std::string> names;
  const auto found = names.find(type.name());
  if (found != names.end()) {
    return found->second;
  }
  const bool of_python = std::string(type.name()).find("PyNode") != std::string::npos;
  if (of_python && !may_wait) {
    return {};
  }
  std::string name = evaluated.name();
  if (!of_python) {
    names.emplace(type.name(), name);
  }
  return name;
}

SitePtr make_site(
    std::string op, bool may_wait, const std::shared_ptr<Caller>& inherited,
    std::shared_ptr<const Stack> read = nullptr) {
  Checker::work_for(inherited ? inherited->host : own_caller ? own_caller->host : kMainThread);
  auto site = std::make_shared<Site>();
  site->op = std::move(op);
  site->label = label_here(inherited);
  if (auto node = node_name(may_wait); !node.empty()) {
    if (!site->label.empty()) {
      site->label += ", ";
    }
    site->label += node;
  }
  site->stack = read ? std::move(read) : may_wait ? gather(inherited) : later();
  return site;
}

bool holds_interpreter() {
  return interpreter_runs() && PyGILState_Check();
}

}  // namespace

SitePtr here(const std::string& op) {
  return make_site(op, /*may_wait=*/true, inherited_caller());
}

SitePtr here_without_waiting(const std::string& op) {
  if (holds_interpreter()) {
    return make_site(op, /*may_wait=*/true, inherited_caller());
  }
  if (auto read = read_without_lock()) {
    return make_site(op, /*may_wait=*/false, inherited_caller(), std::move(read));
  }
  return make_site(op + ", before", /*may_wait=*/false, inherited_caller());
}

void begin_backward() {
  const auto inherited = inherited_caller();
  auto stack = gather(inherited);
  Caller& own = make_own_caller();
  std::lock_guard<std::mutex> lock(own.mutex);
  own.backward.swap(stack);
}

void end_backward() {
  std::shared_ptr<const Stack> none;
  Caller& own = make_own_caller();
  std::lock_guard<std::mutex> lock(own.mutex);
  own.backward.swap(none);
}

void set_tracing(bool on) {
  trace.store(on, std::memory_order_relaxed);
}
bool tracing() {
  return trace.load(std::memory_order_relaxed);
}

std::string set_label(std::string label) {
  Caller& own = make_own_caller();
  std::lock_guard<std::mutex> lock(own.mutex);
  std::swap(own.label, label);
  return label;
}
std::string label() {
  return label_here(inherited_caller());
}

}  // namespace sim
