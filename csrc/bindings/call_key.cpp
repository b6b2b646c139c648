#include "bindings/call_key.h"

#include <descrobject.h>
#include <structmember.h>

#include <array>
#include <cstddef>
#include <memory>

namespace tritondt {
namespace {

constexpr const char* kCapsuleName = "tritondt.call_splitter";
// Operators have up to about 20 arguments, and each gives at most two parts of a key.
constexpr Py_ssize_t kMaxArguments = 32;

struct Decref {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Decref>;

struct Slots {
  PyTypeObject* tensor_class;
  Py_ssize_t spec;
  Py_ssize_t local_tensor;
};

// Borrowed; null where the slot was never filled.
PyObject* slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// What is known of a call so far. Parts are owned by the tuple that `key` makes of them.
class Call {
 public:
  Call(const Slots& slots, Py_ssize_t num_arguments)
      : slots_(slots), local_args_(PyTuple_New(num_arguments)) {}

  // False where the argument is none that is understood, or on a Python error.
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

  // (key, local_args), or null on a Python error.
  PyObject* result() {
    Owned key(PyTuple_New(num_parts_));
    if (key == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < num_parts_; ++i) PyTuple_SET_ITEM(key.get(), i, parts_[i].release());
    return PyTuple_Pack(2, key.get(), local_args_.get());
  }

  bool made() const { return local_args_ != nullptr; }

 private:
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
};

PyObject* split(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 2 || !PyTuple_Check(arguments[0]) || !PyLong_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "split takes a tuple of arguments and static_argnum, an int");
    return nullptr;
  }
  PyObject* args = arguments[0];
  const Py_ssize_t static_argnum = PyLong_AsSsize_t(arguments[1]);
  if (static_argnum == -1 && PyErr_Occurred()) return nullptr;
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  if (count > kMaxArguments) Py_RETURN_NONE;
  const auto* slots = static_cast<const Slots*>(PyCapsule_GetPointer(self, kCapsuleName));
  if (slots == nullptr) return nullptr;
  Call call(*slots, count);
  if (!call.made()) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (call.add(PyTuple_GET_ITEM(args, i), i >= static_argnum)) continue;
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  return call.result();
}

PyMethodDef split_method = {
    "split", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(split)), METH_FASTCALL,
    "split(args, static_argnum): (key, local_args), or None where only the general way knows."};

// Where an instance keeps a slot; -1, with a Python error set, where the class has no such slot.
Py_ssize_t slot_offset(PyTypeObject* type, const char* name) {
  Owned found(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
  if (found == nullptr) return -1;
  if (Py_TYPE(found.get()) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "%s.%s is no slot", type->tp_name, name);
    return -1;
  }
  return reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member->offset;
}

void free_slots(PyObject* capsule) {
  auto* slots = static_cast<Slots*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  Py_DECREF(slots->tensor_class);
  delete slots;
}

}  // namespace

PyObject* make_call_splitter(PyTypeObject* tensor_class) {
  const Py_ssize_t spec = slot_offset(tensor_class, "_spec");
  if (spec < 0) return nullptr;
  const Py_ssize_t local_tensor = slot_offset(tensor_class, "_local_tensor");
  if (local_tensor < 0) return nullptr;
  auto slots = std::make_unique<Slots>(Slots{tensor_class, spec, local_tensor});
  Owned capsule(PyCapsule_New(slots.get(), kCapsuleName, free_slots));
  if (capsule == nullptr) return nullptr;
  Py_INCREF(slots.release()->tensor_class);
  return PyCFunction_New(&split_method, capsule.get());
}

}  // namespace tritondt
