#pragma once

#include <Python.h>

#include <array>
#include <cstddef>
#include <memory>

namespace tritondt {

// Operators have up to about 20 arguments, and each gives at most two parts of a key.
constexpr Py_ssize_t kMaxArguments = 32;

struct Decref {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Decref>;

// Where a class of tensors keeps what makes a tensor distributed.
struct Slots {
  PyTypeObject* tensor_class;
  Py_ssize_t spec;
  Py_ssize_t local_tensor;
  PyTypeObject* plain_class;  // that of local tensors that have nothing of their own, or null
};

// Borrowed; null where the slot was never filled.
inline PyObject* slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// What is known of a call so far. Parts are owned by the tuple that `key` makes of them.
class Call {
 public:
  explicit Call(const Slots& slots) : slots_(slots) {}

  // False where an argument is none that is understood, or on a Python error.
  bool take(PyObject* args, Py_ssize_t static_argnum) {
    const Py_ssize_t count = PyTuple_GET_SIZE(args);
    if (count > kMaxArguments) return false;
    local_args_.reset(PyTuple_New(count));
    if (local_args_ == nullptr) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!add(PyTuple_GET_ITEM(args, i), i >= static_argnum)) return false;
    }
    return true;
  }

  // What tells signatures apart: a new reference, once; null on a Python error.
  PyObject* key() {
    PyObject* key = PyTuple_New(num_parts_);
    if (key == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < num_parts_; ++i) PyTuple_SET_ITEM(key, i, parts_[i].release());
    return key;
  }

  // The arguments with local tensors in place; borrowed.
  PyObject* local_args() const { return local_args_.get(); }

  // Whether all local tensors by themselves are of `plain_class`; those in lists are not looked at.
  bool has_plain_locals() const { return has_plain_locals_; }

 private:
  bool add(PyObject* argument, bool by_value) {
    PyTypeObject* kind = Py_TYPE(argument);
    if (kind == slots_.tensor_class) return add_tensor(argument);
    if (kind == &PyFloat_Type || kind == &PyLong_Type) {
      push(reinterpret_cast<PyObject*>(kind));
      if (by_value) push(argument);
      return add_local(Py_NewRef(argument));
    }
    if (argument == Py_None || kind == &PyBool_Type) {
      push(argument);
      return add_local(Py_NewRef(argument));
    }
    if (kind == &PyList_Type && PyList_GET_SIZE(argument) > 0) return add_list(argument, by_value);
    return false;
  }

  void push(PyObject* borrowed) { push_owned(Py_NewRef(borrowed)); }
  void push_owned(PyObject* owned) { parts_[num_parts_++].reset(owned); }

  bool add_local(PyObject* owned) {
    if (owned == nullptr) return false;
    PyTuple_SET_ITEM(local_args_.get(), num_local_++, owned);
    return true;
  }

  bool add_tensor(PyObject* tensor) {
    PyObject* spec = slot(tensor, slots_.spec);
    PyObject* local = slot(tensor, slots_.local_tensor);
    if (spec == nullptr || local == nullptr) return false;
    push(spec);
    has_plain_locals_ &= Py_TYPE(local) == slots_.plain_class;
    return add_local(Py_NewRef(local));
  }

  bool add_list(PyObject* list, bool by_value) {
    PyTypeObject* kind = Py_TYPE(PyList_GET_ITEM(list, 0));
    const Py_ssize_t length = PyList_GET_SIZE(list);
    for (Py_ssize_t i = 1; i < length; ++i) {
      if (Py_TYPE(PyList_GET_ITEM(list, i)) != kind) return false;
    }
    if (kind == slots_.tensor_class) return add_tensors(list);
    if (kind != &PyLong_Type && kind != &PyFloat_Type) return false;
    // Lengths by value, other numbers by type.
    if (by_value && kind != &PyLong_Type) return false;
    PyObject* part = by_value ? PyList_AsTuple(list) : Py_BuildValue("(ns)", length, kind->tp_name);
    if (part == nullptr) return false;
    push_owned(part);
    return add_local(Py_NewRef(list));
  }

  bool add_tensors(PyObject* list) {
    const Py_ssize_t length = PyList_GET_SIZE(list);
    Owned specs(PyTuple_New(length)), locals(PyList_New(length));
    if (specs == nullptr || locals == nullptr) return false;
    for (Py_ssize_t i = 0; i < length; ++i) {
      PyObject* tensor = PyList_GET_ITEM(list, i);
      PyObject* spec = slot(tensor, slots_.spec);
      PyObject* local = slot(tensor, slots_.local_tensor);
      if (spec == nullptr || local == nullptr) return false;
      PyTuple_SET_ITEM(specs.get(), i, Py_NewRef(spec));
      PyList_SET_ITEM(locals.get(), i, Py_NewRef(local));
    }
    push_owned(specs.release());
    return add_local(locals.release());
  }

  const Slots& slots_;
  Owned local_args_;
  Py_ssize_t num_local_ = 0;
  std::array<Owned, 2 * kMaxArguments> parts_;
  Py_ssize_t num_parts_ = 0;
  bool has_plain_locals_ = true;
};

// Where instances of `tensor_class` keep `_spec` and `_local_tensor`; false, with a Python error
// set, where the class has no such slots.
bool find_slots(PyTypeObject* tensor_class, Slots* found);

// A Python function split(args, static_argnum) for calls with instances of `tensor_class`. It gives
// (key, local_args) of a `Call`; or None where an argument is of a kind that only the caller's
// general way knows. Null, with a Python error set, where the class has no slots.
PyObject* make_call_splitter(PyTypeObject* tensor_class);

}  // namespace tritondt
