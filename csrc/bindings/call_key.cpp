#include "bindings/call_key.h"

#include <descrobject.h>
#include <structmember.h>

#include <memory>

namespace tritondt {
namespace {

constexpr const char* kCapsuleName = "tritondt.call_splitter";
PyObject* split(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 2 || !PyTuple_Check(arguments[0]) || !PyLong_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "split takes a tuple of arguments and static_argnum, an int");
    return nullptr;
  }
  PyObject* args = arguments[0];
  const Py_ssize_t static_argnum = PyLong_AsSsize_t(arguments[1]);
  if (static_argnum == -1 && PyErr_Occurred()) return nullptr;
  const auto* slots = static_cast<const Slots*>(PyCapsule_GetPointer(self, kCapsuleName));
  if (slots == nullptr) return nullptr;
  Call call(*slots);
  if (!call.take(args, static_argnum)) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  const Owned key(call.key());
  return key == nullptr ? nullptr : PyTuple_Pack(2, key.get(), call.local_args());
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

bool find_slots(PyTypeObject* tensor_class, Slots* found) {
  found->tensor_class = tensor_class;
  found->plain_class = nullptr;
  found->spec = slot_offset(tensor_class, "_spec");
  if (found->spec < 0) return false;
  found->local_tensor = slot_offset(tensor_class, "_local_tensor");
  return found->local_tensor >= 0;
}

PyObject* make_call_splitter(PyTypeObject* tensor_class) {
  auto slots = std::make_unique<Slots>();
  if (!find_slots(tensor_class, slots.get())) return nullptr;
  Owned capsule(PyCapsule_New(slots.get(), kCapsuleName, free_slots));
  if (capsule == nullptr) return nullptr;
  Py_INCREF(slots.release()->tensor_class);
  return PyCFunction_New(&split_method, capsule.get());
}

}  // namespace tritondt
