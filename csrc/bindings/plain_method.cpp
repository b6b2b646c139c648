#include "bindings/plain_method.h"

namespace tritondt {
namespace {

PyTypeObject* method_type = nullptr;

PlainMethod* method_of(PyObject* self) { return reinterpret_cast<PlainMethod*>(self); }

PyObject* call(PyObject* self, PyObject* const* values, std::size_t flags, PyObject* names) {
  PlainMethod* method = method_of(self);
  if (names == nullptr) {
    PyObject* found = method->attempt(method, values, PyVectorcall_NARGS(flags));
    if (found != nullptr || PyErr_Occurred() != nullptr) return found;
  }
  return PyObject_Vectorcall(method->general, values, flags & ~PY_VECTORCALL_ARGUMENTS_OFFSET,
                             names);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(method_of(self)->general);
  Py_VISIT(method_of(self)->details);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(method_of(self)->general);
  Py_CLEAR(method_of(self)->details);
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* bind(PyObject* self, PyObject* object, PyObject* /*type*/) {
  if (object == nullptr || object == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, object);
}

PyObject* doc(PyObject* self, void* /*unused*/) {
  return PyObject_GetAttrString(method_of(self)->general, "__doc__");
}

// What is not found here is the function's: __name__, __qualname__, __module__, __annotations__.
PyObject* attribute(PyObject* self, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr(self, name);
  if (found != nullptr || PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return found;
  PyErr_Clear();
  return PyObject_GetAttr(method_of(self)->general, name);
}

PyGetSetDef getters[] = {{"__doc__", doc, nullptr, nullptr, nullptr}, {}};

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PlainMethod, call), READONLY, nullptr},
    {"__wrapped__", T_OBJECT, offsetof(PlainMethod, general), READONLY, nullptr},
    {},
};

PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
    {Py_tp_getattro, reinterpret_cast<void*>(attribute)},
    {Py_tp_getset, getters},
    {Py_tp_members, members},
    {},
};

PyType_Spec spec = {"tritondt._C.PlainMethod", sizeof(PlainMethod), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                        Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                    slots};

}  // namespace

bool make_plain_method_type() {
  method_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return method_type != nullptr;
}

PyObject* make_plain_method(PyObject* general, PyObject* details, PlainMethod::Try attempt) {
  auto* made = reinterpret_cast<PlainMethod*>(method_type->tp_alloc(method_type, 0));
  if (made == nullptr) return nullptr;
  made->general = Py_NewRef(general);
  made->details = Py_XNewRef(details);
  made->attempt = attempt;
  made->call = call;
  return reinterpret_cast<PyObject*>(made);
}

}  // namespace tritondt
