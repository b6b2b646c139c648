#include "bindings/operator_calls.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "bindings/call_key.h"
#include "bindings/plain_method.h"

namespace py = pybind11;

namespace tritondt {
namespace {

constexpr const char* kWrapping = "tritondt.wrapping";
constexpr const char* kDispatching = "tritondt.dispatching";
constexpr const char* kGradient = "tritondt.gradient";

// The fields of tritondt.dtensor.compiled_call.CompiledCall, and the values of its first.
enum Field { kKind, kLocal, kSpec, kGeneralRun, kDetails, kDirect, kNumFields };
enum Kind { kGeneral, kOne, kList, kView, kWrite, kDetach };
// Of a write: the places of written tensors among all, the argument that is returned or -1, and
// those whose versions are raised.
enum WriteDetail { kWritten, kReturned, kRaised };
// Of an operator: its compiled signatures by key, and its static_argnum.
enum OperatorField { kSignatures, kStaticArgnum, kNumOperatorFields };

// The operator that this thread dispatches, borrowed from its caller; null where it dispatches
// none.
thread_local PyObject* running = nullptr;

class Running {
 public:
  explicit Running(PyObject* op) : before_(running) { running = op; }
  ~Running() { running = before_; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  PyObject* before_;
};

// What a wrap goes by; lives as long as the process, as classes of tensors do.
struct Wrapping {
  py::object tensor_class, construct, forward_ad, is_inference, storage_offset, level, names;
};

struct Dispatching {
  Slots slots;
  py::object operators, signatures_of, wrap, run_any, enter, run_apart, readers, watched;
  py::object is_grad_enabled, num_modes, raise_versions, detach, nothing;
  py::object attributes, base, recorded, memory, former;
};

// Of what a tensor's gradient is read by: torch's own descriptor.
struct Gradient {
  py::object descriptor;
  PyTypeObject* tensor_class;
};

template <typename Details>
Details* details_of(const PlainMethod* method, const char* name) {
  return static_cast<Details*>(PyCapsule_GetPointer(method->details, name));
}

// Whether torch's own constructor makes a right tensor of `local` here: 1 or 0, or -1 with an
// error.
int is_constructed(const Wrapping& by, PyObject* local) {
  PyObject* level = PyDict_GetItemWithError(by.forward_ad.ptr(), by.level.ptr());
  if (level == nullptr) return PyErr_Occurred() != nullptr ? -1 : 0;
  const long value = PyLong_AsLong(level);
  if (value == -1 && PyErr_Occurred() != nullptr) return -1;
  if (value >= 0) return 0;
  const Owned is_inference(PyObject_CallNoArgs(by.is_inference.ptr()));
  if (is_inference == nullptr) return -1;
  if (is_inference.get() == Py_True) return 0;
  const Owned offset(PyObject_CallOneArg(by.storage_offset.ptr(), local));
  if (offset == nullptr) return -1;
  const int is_behind = PyObject_IsTrue(offset.get());
  return is_behind < 0 ? -1 : 1 - is_behind;
}

PyObject* constructed(const Wrapping& by, PyObject* local, PyObject* spec) {
  PyObject* const values[] = {by.tensor_class.ptr(), local, spec, Py_False};
  return PyObject_Vectorcall(by.construct.ptr(), values, 3, by.names.ptr());
}

PyObject* attempt_wrap(PlainMethod* self, PyObject* const* values, Py_ssize_t count) {
  if (count != 2) return nullptr;
  const auto* by = details_of<Wrapping>(self, kWrapping);
  if (by == nullptr || is_constructed(*by, values[0]) != 1) return nullptr;
  return constructed(*by, values[0], values[1]);
}

// A tensor's gradient, where it is there and distributed, or there is none.
PyObject* attempt_gradient(PlainMethod* self, PyObject* const* values, Py_ssize_t count) {
  if (count != 1) return nullptr;
  const auto* by = details_of<Gradient>(self, kGradient);
  if (by == nullptr) return nullptr;
  PyObject* descriptor = by->descriptor.ptr();
  auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(values[0]));
  Owned found(Py_TYPE(descriptor)->tp_descr_get(descriptor, values[0], kind));
  if (found == nullptr) return nullptr;
  const bool is_done =
      found.get() == Py_None || PyObject_TypeCheck(found.get(), by->tensor_class) != 0;
  return is_done ? found.release() : nullptr;
}

PyObject* wrapped(const Dispatching& by, PyObject* local, PyObject* spec) {
  PyObject* const values[] = {local, spec};
  return PyObject_Vectorcall(by.wrap.ptr(), values, 2, nullptr);
}

// A list of as many distributed tensors as there are specs, of as many local tensors.
PyObject* wrapped_all(const Dispatching& by, PyObject* locals, PyObject* specs) {
  const Owned items(PySequence_Fast(locals, "an operator on lists gave no list"));
  if (items == nullptr) return nullptr;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.get());
  if (count != PyTuple_GET_SIZE(specs)) {
    PyErr_Format(PyExc_ValueError, "an operator gave %zd tensors for %zd specs", count,
                 PyTuple_GET_SIZE(specs));
    return nullptr;
  }
  Owned found(PyList_New(count));
  if (found == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* made =
        wrapped(by, PySequence_Fast_GET_ITEM(items.get(), i), PyTuple_GET_ITEM(specs, i));
    if (made == nullptr) return nullptr;
    PyList_SET_ITEM(found.get(), i, made);
  }
  return found.release();
}

// By a function of Python's that torch.compile does not look into, unless there is no Python in it.
PyObject* called(const Dispatching& by, PyObject* function, PyObject* arguments) {
  if (PyCFunction_Check(function) || Py_IS_TYPE(function, &PyMethodDescr_Type)) {
    return PyObject_Call(function, arguments, nullptr);
  }
  PyObject* values[1 + kMaxArguments] = {function};
  const Py_ssize_t count = PyTuple_GET_SIZE(arguments);
  std::copy_n(&PyTuple_GET_ITEM(arguments, 0), count, values + 1);
  return PyObject_Vectorcall(by.enter.ptr(), values, 1 + count, nullptr);
}

// The operator on local tensors: by torch's own binding of it, which looks at its arguments in half
// the time, unless a mode or a class of local tensors hears of functions of torch.
PyObject* run_local(const Dispatching& by, PyObject* call, const Call& given) {
  PyObject* direct = PyTuple_GET_ITEM(call, kDirect);
  if (direct != Py_None && given.has_plain_locals()) {
    const Owned num_modes(PyObject_CallNoArgs(by.num_modes.ptr()));
    if (num_modes == nullptr) return nullptr;
    if (PyLong_AsLong(num_modes.get()) == 0) {
      return PyObject_Call(direct, given.local_args(), nullptr);
    }
  }
  return called(by, PyTuple_GET_ITEM(call, kLocal), given.local_args());
}

PyObject* run_any(const Dispatching& by, PyObject* op, PyObject* args, PyObject* kwargs) {
  PyObject* given = kwargs == Py_None ? by.nothing.ptr() : kwargs;
  PyObject* const values[] = {by.run_any.ptr(), op, args, given};
  return PyObject_Vectorcall(by.enter.ptr(), values, 4, nullptr);
}

PyObject* run_general(const Dispatching& by, PyObject* call, PyObject* local_args, PyObject* args) {
  PyObject* nothing = by.nothing.ptr();
  PyObject* const values[] = {
      by.enter.ptr(), PyTuple_GET_ITEM(call, kGeneralRun), local_args, nothing, args, nothing};
  return PyObject_Vectorcall(values[0], values + 1, 5, nullptr);
}

Owned attributes_of(const Dispatching& by, PyObject* tensor) {
  return Owned(PyObject_GetAttr(tensor, by.attributes.ptr()));
}

// Notes on a tensor, or on what it is a view of, that autograd records a view of it.
bool note_view(const Dispatching& by, PyObject* tensor) {
  const Owned is_enabled(PyObject_CallNoArgs(by.is_grad_enabled.ptr()));
  if (is_enabled == nullptr) return false;
  if (is_enabled.get() != Py_True) return true;
  const Owned base(PyObject_GetAttr(tensor, by.base.ptr()));
  if (base == nullptr) return false;
  const Owned attributes = attributes_of(by, base.get() == Py_None ? tensor : base.get());
  return attributes != nullptr &&
         PyObject_SetItem(attributes.get(), by.recorded.ptr(), Py_True) == 0;
}

PyObject* run_view(const Dispatching& by, PyObject* call, const Call& given, PyObject* args) {
  PyObject* local_args = given.local_args();
  if (PyTuple_GET_SIZE(args) == 0 || Py_TYPE(PyTuple_GET_ITEM(args, 0)) != by.slots.tensor_class) {
    return run_general(by, call, local_args, args);
  }
  PyObject* shape = PyTuple_GET_ITEM(call, kDetails);
  Owned result;
  if (shape == Py_None) {
    if (!note_view(by, PyTuple_GET_ITEM(args, 0))) return nullptr;
    result.reset(run_local(by, call, given));
  } else {
    PyObject* const values[] = {PyTuple_GET_ITEM(local_args, 0), shape};
    result.reset(PyObject_Vectorcall(PyTuple_GET_ITEM(call, kLocal), values, 2, nullptr));
    // This rank's strides may forbid the view; torch's fake tensors say so by a ValueError.
    if (result == nullptr && (PyErr_ExceptionMatches(PyExc_RuntimeError) != 0 ||
                              PyErr_ExceptionMatches(PyExc_ValueError) != 0)) {
      PyErr_Clear();
      return run_general(by, call, local_args, args);
    }
    if (result == nullptr || !note_view(by, PyTuple_GET_ITEM(args, 0))) return nullptr;
  }
  return result == nullptr ? nullptr : wrapped(by, result.get(), PyTuple_GET_ITEM(call, kSpec));
}

// The result of `run_apart` for an operator that has raised a RuntimeError, which is taken.
PyObject* apart(const Dispatching& by, PyObject* call, PyObject* local_args) {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  const Owned kept_type(type), kept_error(error), kept_trace(trace);
  PyObject* written = PyTuple_GET_ITEM(PyTuple_GET_ITEM(call, kDetails), kWritten);
  PyObject* const values[] = {by.run_apart.ptr(),
                              PyTuple_GET_ITEM(call, kLocal),
                              local_args,
                              by.nothing.ptr(),
                              written,
                              error};
  return PyObject_Vectorcall(by.enter.ptr(), values, 6, nullptr);
}

PyObject* run_write(const Dispatching& by, PyObject* call, const Call& given, PyObject* args) {
  PyObject* local_args = given.local_args();
  if (PyDict_GET_SIZE(by.readers.ptr()) != 0 || PyDict_GET_SIZE(by.watched.ptr()) != 0) {
    return run_general(by, call, local_args, args);
  }
  PyObject* details = PyTuple_GET_ITEM(call, kDetails);
  const Py_ssize_t returned = PyLong_AsSsize_t(PyTuple_GET_ITEM(details, kReturned));
  PyObject* raised = PyTuple_GET_ITEM(details, kRaised);
  Owned result(run_local(by, call, given));
  if (result == nullptr && PyErr_ExceptionMatches(PyExc_RuntimeError) != 0) {
    result.reset(apart(by, call, local_args));
  }
  if (result == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(raised); ++i) {
    const Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(raised, i));
    const Owned done(PyObject_CallOneArg(by.raise_versions.ptr(), PyTuple_GET_ITEM(args, place)));
    if (done == nullptr) return nullptr;
  }
  return Py_NewRef(returned < 0 ? Py_None : PyTuple_GET_ITEM(args, returned));
}

// The local tensors that stand for a tensor's memory, as `memory_of` of tritondt.dtensor.writes has
// them; null where only that function knows, or with an error.
Owned memory_of(const Dispatching& by, PyObject* tensor) {
  if (PyObject_TypeCheck(tensor, by.slots.tensor_class) == 0) return nullptr;
  const Owned attributes = attributes_of(by, tensor);
  if (attributes == nullptr) return nullptr;
  Owned memory(Py_XNewRef(PyDict_GetItemWithError(attributes.get(), by.memory.ptr())));
  if (memory != nullptr || PyErr_Occurred() != nullptr) return memory;
  const Owned base(PyObject_GetAttr(tensor, by.base.ptr()));
  if (base == nullptr) return nullptr;
  if (base.get() != Py_None) {
    const Owned of_base = attributes_of(by, base.get());
    if (of_base == nullptr) return nullptr;
    // Given another memory since, which some of its views have, and some have not.
    if (PyDict_Contains(of_base.get(), by.former.ptr()) != 0) return nullptr;
    return memory_of(by, base.get());
  }
  PyObject* local = slot(tensor, by.slots.local_tensor);
  if (local == nullptr) return nullptr;
  memory.reset(PyTuple_Pack(1, local));
  if (memory == nullptr || PyDict_SetItem(attributes.get(), by.memory.ptr(), memory.get()) != 0) {
    return nullptr;
  }
  return memory;
}

// A tensor that torch does not know for a view, but that shares memory.
PyObject* run_detach(const Dispatching& by, PyObject* call, const Call& given, PyObject* args) {
  const Owned memory = memory_of(by, PyTuple_GET_ITEM(args, 0));
  if (memory == nullptr) {
    return PyErr_Occurred() != nullptr ? nullptr : run_general(by, call, given.local_args(), args);
  }
  const Owned local(PyObject_CallOneArg(by.detach.ptr(), PyTuple_GET_ITEM(given.local_args(), 0)));
  if (local == nullptr) return nullptr;
  Owned made(wrapped(by, local.get(), PyTuple_GET_ITEM(call, kSpec)));
  if (made == nullptr) return nullptr;
  const Owned own = attributes_of(by, made.get());
  if (own == nullptr || PyDict_SetItem(own.get(), by.memory.ptr(), memory.get()) != 0) {
    return nullptr;
  }
  return made.release();
}

PyObject* run(const Dispatching& by, PyObject* call, const Call& given, PyObject* args) {
  switch (PyLong_AsLong(PyTuple_GET_ITEM(call, kKind))) {
    case kOne: {
      const Owned result(run_local(by, call, given));
      return result == nullptr ? nullptr : wrapped(by, result.get(), PyTuple_GET_ITEM(call, kSpec));
    }
    case kList: {
      const Owned result(run_local(by, call, given));
      return result == nullptr ? nullptr
                               : wrapped_all(by, result.get(), PyTuple_GET_ITEM(call, kSpec));
    }
    case kView:
      return run_view(by, call, given, args);
    case kWrite:
      return run_write(by, call, given, args);
    case kDetach:
      return run_detach(by, call, given, args);
    default:
      return run_general(by, call, given.local_args(), args);
  }
}

PyObject* not_compiled() {
  PyErr_SetString(PyExc_TypeError, "the table of operators has something else than CompiledCalls");
  return nullptr;
}

// op, types, args, kwargs, as torch calls it.
PyObject* attempt_dispatch(PlainMethod* self, PyObject* const* values, Py_ssize_t count) {
  if (count < 3 || count > 4) return nullptr;
  const auto* by = details_of<Dispatching>(self, kDispatching);
  if (by == nullptr) return nullptr;
  PyObject *op = values[0], *args = values[2], *kwargs = count == 4 ? values[3] : Py_None;
  const Running noted(op);
  const bool has_names =
      kwargs != Py_None && (!PyDict_CheckExact(kwargs) || PyDict_GET_SIZE(kwargs) != 0);
  if (has_names || !PyTuple_CheckExact(args)) return run_any(*by, op, args, kwargs);
  const Owned identity(PyLong_FromVoidPtr(op));
  if (identity == nullptr) return nullptr;
  PyObject* known = PyDict_GetItemWithError(by->operators.ptr(), identity.get());
  if (known == nullptr) {
    return PyErr_Occurred() != nullptr ? nullptr : run_any(*by, op, args, kwargs);
  }
  if (!PyTuple_Check(known) || PyTuple_GET_SIZE(known) < kNumOperatorFields) return not_compiled();
  // Held: another thread may forget all signatures while this one hashes a spec or runs the call.
  const Owned signatures(Py_NewRef(PyTuple_GET_ITEM(known, kSignatures)));
  Call call(by->slots);
  if (!call.take(args, PyLong_AsSsize_t(PyTuple_GET_ITEM(known, kStaticArgnum)))) {
    return PyErr_Occurred() != nullptr ? nullptr : run_any(*by, op, args, kwargs);
  }
  const Owned key(call.key());
  if (key == nullptr) return nullptr;
  const Owned found(Py_XNewRef(PyDict_GetItemWithError(signatures.get(), key.get())));
  if (found == nullptr) {
    return PyErr_Occurred() != nullptr ? nullptr : run_any(*by, op, args, kwargs);
  }
  if (!PyTuple_Check(found.get()) || PyTuple_GET_SIZE(found.get()) != kNumFields) {
    return not_compiled();
  }
  return run(*by, found.get(), call, args);
}

constexpr const char* kTorchFunction = "__torch_function__";
PyObject* torch_function = nullptr;  // that text as a string of Python's

PyObject* attribute_by_text(PyObject* tensor, char* name) {
  const bool is_known = std::strcmp(name, kTorchFunction) == 0;
  const Owned text(is_known ? Py_NewRef(torch_function) : PyUnicode_FromString(name));
  return text == nullptr ? nullptr : Py_TYPE(tensor)->tp_getattro(tensor, text.get());
}

// Torch's parser asks every argument of a subclass for __torch_function__, once for each overload
// that it tries, by a text. Python would make a string of it each time, which misses its cache of
// the attributes of classes.
void answer_torch_function(const py::type& tensor_class) {
  if (torch_function == nullptr) torch_function = PyUnicode_InternFromString(kTorchFunction);
  if (torch_function == nullptr) throw py::error_already_set();
  reinterpret_cast<PyTypeObject*>(tensor_class.ptr())->tp_getattr = attribute_by_text;
}

py::object method_of(const py::function& general, void* details, const char* name,
                     void (*free)(PyObject*), PlainMethod::Try attempt) {
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(details, name, free));
  if (!capsule) throw py::error_already_set();
  PyObject* made = make_plain_method(general.ptr(), capsule.ptr(), attempt);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

template <typename Details>
void free_details(PyObject* capsule) {
  delete static_cast<Details*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
}

py::object interned(const char* text) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text));
}

py::object make_wrap(const py::function& general, const py::type& tensor_class,
                     const py::object& construct) {
  const auto torch = py::module_::import("torch");
  auto details = std::make_unique<Wrapping>();
  details->tensor_class = tensor_class;
  details->construct = construct;
  details->forward_ad = py::module_::import("torch.autograd.forward_ad").attr("__dict__");
  details->is_inference = torch.attr("is_inference_mode_enabled");
  details->storage_offset = torch.attr("Tensor").attr("storage_offset");
  details->level = interned("_current_level");
  details->names = py::make_tuple("requires_grad");
  return method_of(general, details.release(), kWrapping, free_details<Wrapping>, attempt_wrap);
}

py::object make_gradient(const py::function& general, const py::type& tensor_class,
                         const py::object& descriptor) {
  if (Py_TYPE(descriptor.ptr())->tp_descr_get == nullptr) {
    throw py::type_error("make_gradient takes a descriptor");
  }
  auto details = std::make_unique<Gradient>();
  details->descriptor = descriptor;
  details->tensor_class = reinterpret_cast<PyTypeObject*>(tensor_class.ptr());
  Py_INCREF(tensor_class.ptr());
  return method_of(general, details.release(), kGradient, free_details<Gradient>, attempt_gradient);
}

py::object make_dispatch(const py::function& general, const py::type& tensor_class,
                         const py::dict& operators, const py::object& wrap,
                         const py::function& run_any, const py::function& enter,
                         const py::function& run_apart, const py::dict& readers,
                         const py::dict& watched, const py::str& recorded, const py::str& memory,
                         const py::str& former) {
  const auto torch = py::module_::import("torch");
  auto details = std::make_unique<Dispatching>();
  if (!find_slots(reinterpret_cast<PyTypeObject*>(tensor_class.ptr()), &details->slots)) {
    throw py::error_already_set();
  }
  Py_INCREF(tensor_class.ptr());
  const py::object plain_class = torch.attr("Tensor");
  details->slots.plain_class = reinterpret_cast<PyTypeObject*>(plain_class.ptr());
  details->operators = operators;
  details->wrap = wrap;
  details->run_any = run_any;
  details->enter = enter;
  details->run_apart = run_apart;
  details->readers = readers;
  details->watched = watched;
  details->is_grad_enabled = torch.attr("is_grad_enabled");
  details->num_modes = torch.attr("_C").attr("_len_torch_function_stack");
  details->raise_versions = torch.attr("_C").attr("_increment_version");
  details->detach = torch.attr("Tensor").attr("detach");
  details->nothing = py::dict();
  details->attributes = interned("__dict__");
  details->base = interned("_base");
  details->recorded = recorded;
  details->memory = memory;
  details->former = former;
  return method_of(general, details.release(), kDispatching, free_details<Dispatching>,
                   attempt_dispatch);
}

}  // namespace

void bind_operator_calls(py::module_* module) {
  module->def(
      "make_wrap", &make_wrap, py::arg("general"), py::arg("tensor_class"), py::arg("construct"),
      "wrap(local, spec), by `general` where torch's own constructor makes no right tensor.");
  module->def(
      "make_dispatch", &make_dispatch, py::arg("general"), py::arg("tensor_class"),
      py::arg("operators"), py::arg("wrap"), py::arg("run_any"), py::arg("enter"),
      py::arg("run_apart"), py::arg("readers"), py::arg("watched"), py::arg("recorded"),
      py::arg("memory"), py::arg("former"),
      "__torch_dispatch__ of a class: calls in `operators` in one go, others by `run_any`.");
  module->def("make_gradient", &make_gradient, py::arg("general"), py::arg("tensor_class"),
              py::arg("descriptor"),
              "get(tensor): its gradient by torch's descriptor, by `general` where that is plain.");
  module->def("answer_torch_function", &answer_torch_function, py::arg("tensor_class"),
              "Has a class answer what torch asks of every argument without a new string.");
  module->def(
      "running_operator",
      [] { return py::reinterpret_borrow<py::object>(running == nullptr ? Py_None : running); },
      "The operator that the calling thread dispatches, the innermost; or None.");
}

}  // namespace tritondt
