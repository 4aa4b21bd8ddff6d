// Attributes and constructors of torch's own classes, replaced while a program runs under CUDA's names (as_cuda.py).
//
// Python refuses to set an attribute of a class that is written in C, such as torch.device, because extensions rely on
// these classes not to change. What is replaced here are answers to Python code only; torch's C++ does not see them.
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

void set_class_attribute(const py::object& type, const py::str& name, const py::object& value) {
  const Unlocked unlocked(class_of(type));
  if (PyObject_SetAttr(type.ptr(), name.ptr(), value.ptr()) != 0) {
    throw py::error_already_set();
  }
}

/// The class then inherits the attribute again.
void delete_class_attribute(const py::object& type, const py::str& name) {
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
