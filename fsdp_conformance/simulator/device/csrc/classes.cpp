// Attributes and constructors of torch's own classes, replaced while a program runs under CUDA's names (as_cuda.py).
//
// Python refuses to set an attribute of a class that is written in C, such as torch.device, because extensions rely on
// these classes not to change. What is replaced here are answers to Python code only; torch's C++ does not see them.
#include <pybind11/eval.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <string>
#include <unordered_map>

namespace py = pybind11;

namespace sim {

namespace {

/// Allows attributes of a class to be set, in its lifetime. Slots such as tp_repr follow the attributes.
class Unlocked {
 public:
  explicit Unlocked(PyTypeObject* type) : type_(type), locked_(type->tp_flags & Py_TPFLAGS_IMMUTABLETYPE) {
    type_->tp_flags &= ~static_cast<unsigned long>(Py_TPFLAGS_IMMUTABLETYPE);
  }
  ~Unlocked() {
    type_->tp_flags |= locked_;
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyTypeObject* type_;
  unsigned long locked_;
};

PyTypeObject* class_of(const py::object& type) {
  if (!PyType_Check(type.ptr())) {
    throw py::type_error("type must be a class");
  }
  return reinterpret_cast<PyTypeObject*>(type.ptr());
}

#if PY_VERSION_HEX >= 0x030C0000

// Since Python 3.12 each interpreter keeps the attributes of Python's own types apart from the type, and setting one as
// usual is lost in 3.13. So it is set where they are kept, and the slots are made to follow.

bool is_pythons_own(PyTypeObject* type) {
  return type->tp_dict == nullptr;
}

/// What a class has in its slot for `str` if it defines `__str__` in Python.
reprfunc str_from_attribute() {
  static const reprfunc slot = [] {
    const py::dict scope;
    py::exec("class Defines:\n    def __str__(self):\n        return ''", scope);
    return reinterpret_cast<PyTypeObject*>(scope["Defines"].ptr())->tp_str;
  }();
  return slot;
}

/// Give a type another slot for `str`, and those derived from it that inherit it.
void inherit_str(PyTypeObject* type, reprfunc before, reprfunc now) {
  if (type->tp_str != before) {
    return;
  }
  type->tp_str = now;
  const py::object derived =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type)).attr("__subclasses__")();
  for (const py::handle one : derived) {
    inherit_str(reinterpret_cast<PyTypeObject*>(one.ptr()), before, now);
  }
}

/// `value`: null to delete the attribute.
void change_pythons_own(PyTypeObject* type, const py::str& name, PyObject* value) {
  const auto attributes = py::reinterpret_steal<py::object>(PyType_GetDict(type));
  const int failed = value != nullptr ? PyDict_SetItem(attributes.ptr(), name.ptr(), value)
                                      : PyDict_DelItem(attributes.ptr(), name.ptr());
  if (failed) {
    throw py::error_already_set();
  }
  PyType_Modified(type);
  if (std::string(name) == "__str__") {
    const reprfunc now = value != nullptr ? str_from_attribute() : type->tp_base->tp_str;
    inherit_str(type, type->tp_str, now);
  }
}

#else

bool is_pythons_own(PyTypeObject*) {
  return false;  // nor is there a need to know
}

void change_pythons_own(PyTypeObject*, const py::str&, PyObject*) {}

#endif

void set_class_attribute(const py::object& type, const py::str& name, const py::object& value) {
  if (is_pythons_own(class_of(type))) {
    change_pythons_own(class_of(type), name, value.ptr());
    return;
  }
  const Unlocked unlocked(class_of(type));
  if (PyObject_SetAttr(type.ptr(), name.ptr(), value.ptr()) != 0) {
    throw py::error_already_set();
  }
}

/// The class then inherits the attribute again.
void delete_class_attribute(const py::object& type, const py::str& name) {
  if (is_pythons_own(class_of(type))) {
    change_pythons_own(class_of(type), name, nullptr);
    return;
  }
  const Unlocked unlocked(class_of(type));
  if (PyObject_DelAttr(type.ptr(), name.ptr()) != 0) {
    throw py::error_already_set();
  }
}

/// The constructors of the classes that translate, or did: classes derived meanwhile keep calling ours.
std::unordered_map<PyTypeObject*, newfunc>& constructors() {
  static auto* all = new std::unordered_map<PyTypeObject*, newfunc>();
  return *all;
}

bool translating = false;

/// "sim" for "cuda", "sim:1" for "cuda:1"; other values unchanged. A new reference, or null with an exception.
PyObject* translated(PyObject* value) {
  if (PyUnicode_Check(value)) {
    const char* text = PyUnicode_AsUTF8(value);
    if (text == nullptr) {
      PyErr_Clear();  // not text that names a device
    } else if (std::strncmp(text, "cuda", 4) == 0) {
      const char* rest = text + 4;
      const bool numbered =
          rest[0] == ':' && rest[1] != '\0' && std::strspn(rest + 1, "0123456789") == std::strlen(rest + 1);
      if (rest[0] == '\0' || numbered) {
        return PyUnicode_FromFormat("sim%s", rest);
      }
    }
  }
  Py_INCREF(value);
  return value;
}

PyObject* new_from_names(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  newfunc construct = nullptr;
  for (PyTypeObject* base = type; base != nullptr && construct == nullptr; base = base->tp_base) {
    const auto found = constructors().find(base);
    construct = found == constructors().end() ? nullptr : found->second;
  }
  if (construct == nullptr) {
    PyErr_Format(PyExc_SystemError, "%s has no constructor", type->tp_name);
    return nullptr;
  }
  if (!translating) {
    return construct(type, args, kwargs);
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  const py::object words = py::reinterpret_steal<py::object>(PyTuple_New(count));
  if (!words) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(words.ptr(), i, translated(PyTuple_GET_ITEM(args, i)));
  }
  py::object named;
  if (kwargs != nullptr) {
    named = py::reinterpret_steal<py::object>(PyDict_New());
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(kwargs, &position, &key, &value)) {
      const py::object word = py::reinterpret_steal<py::object>(translated(value));
      if (!word || PyDict_SetItem(named.ptr(), key, word.ptr()) != 0) {
        return nullptr;
      }
    }
  }
  return construct(type, words.ptr(), named.ptr());
}

/// Let the classes translate CUDA's names among the arguments of their constructors.
void translate_constructors(const py::list& types) {
  for (const py::handle& one : types) {
    PyTypeObject* type = class_of(py::reinterpret_borrow<py::object>(one));
    if (constructors().emplace(type, type->tp_new).second) {
      type->tp_new = &new_from_names;
      PyType_Modified(type);
    }
  }
  translating = true;
}

}  // namespace

void bind_classes(py::module_& module) {
  module.def("set_class_attribute", &set_class_attribute);
  module.def("delete_class_attribute", &delete_class_attribute);
  module.def("translate_constructors", &translate_constructors);
  module.def("leave_constructors", [] { translating = false; });
}

}  // namespace sim
