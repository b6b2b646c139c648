#include "bindings/stream_engine.h"

#include <structmember.h>

#include <array>
#include <utility>

#include "bindings/flight.h"
#include "cpu/clock.h"

namespace py = pybind11;

namespace tritondt {
namespace {

PyTypeObject* in_flight_type = nullptr;
PyTypeObject* engine_type = nullptr;

// Names of methods of streams and events, made once.
struct Names {
  PyObject* query = PyUnicode_InternFromString("query");
  PyObject* current = PyUnicode_InternFromString("current");
  PyObject* is_capturing = PyUnicode_InternFromString("is_capturing");
  PyObject* follow = PyUnicode_InternFromString("follow");
  PyObject* record = PyUnicode_InternFromString("record");
  PyObject* record_event = PyUnicode_InternFromString("record_event");
  PyObject* wait_event = PyUnicode_InternFromString("wait_event");
};
const Names* names = nullptr;

void set(PyObject** slot, PyObject* borrowed) {
  PyObject* before = *slot;
  *slot = Py_NewRef(borrowed);
  Py_XDECREF(before);
}

// A new reference; None where there is nothing.
PyObject* value_of(PyObject* slot) { return Py_NewRef(slot == nullptr ? Py_None : slot); }

bool has(PyObject* slot) { return slot != nullptr && slot != Py_None; }

// Calls a method and drops what it gives; false on a Python error.
bool call(PyObject* object, PyObject* name, PyObject* argument, PyObject* other = nullptr) {
  PyObject* found = PyObject_CallMethodObjArgs(object, name, argument, other, nullptr);
  Py_XDECREF(found);
  return found != nullptr;
}

// 1 or 0; -1 on a Python error.
int ask(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_CallMethodNoArgs(object, name);
  if (found == nullptr) return -1;
  const int answer = PyObject_IsTrue(found);
  Py_DECREF(found);
  return answer;
}

bool check_count(const char* name, Py_ssize_t count, Py_ssize_t least, Py_ssize_t most) {
  if (count >= least && count <= most) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd to %zd arguments, but %zd were given", name, least,
               most, count);
  return false;
}

InFlight* in_flight_of(PyObject* object) {
  if (PyObject_TypeCheck(object, in_flight_type)) return reinterpret_cast<InFlight*>(object);
  PyErr_Format(PyExc_TypeError, "an InFlight is taken, not %.100s", Py_TYPE(object)->tp_name);
  return nullptr;
}

// In flight ---------------------------------------------------------------------------------------

PyObject* in_flight_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject *text = nullptr, *fingerprint = nullptr, *held = nullptr;
  long long site = -1;
  double timeout_s = 0;
  if (!PyArg_ParseTuple(args, "OOLd|O", &text, &fingerprint, &site, &timeout_s, &held)) {
    return nullptr;
  }
  const unsigned long long number = PyLong_AsUnsignedLongLong(fingerprint);
  if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) return nullptr;
  auto* made = reinterpret_cast<InFlight*>(type->tp_alloc(type, 0));
  if (made == nullptr) return nullptr;
  set(&made->text, text);
  if (held != nullptr) set(&made->held, held);
  made->fingerprint = number;
  made->site = site;
  made->timeout_s = timeout_s;
  made->record = -1;
  return reinterpret_cast<PyObject*>(made);
}

template <typename Visit>
int each_slot(InFlight* self, const Visit& visit) {
  for (PyObject** slot : {&self->event, &self->stream, &self->caller, &self->held, &self->error,
                          &self->text, &self->messages, &self->late, &self->engine}) {
    if (const int found = visit(slot); found != 0) return found;
  }
  return 0;
}

int clear_slot(PyObject** slot) {
  Py_CLEAR(*slot);
  return 0;
}

int in_flight_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return each_slot(reinterpret_cast<InFlight*>(self), [visit, arg](PyObject** slot) {
    return *slot == nullptr ? 0 : visit(*slot, arg);
  });
}

int in_flight_clear(PyObject* self) {
  return each_slot(reinterpret_cast<InFlight*>(self), clear_slot);
}

void in_flight_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  in_flight_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// 1 or 0; -1 on a Python error.
int is_over(InFlight* operation) {
  PyObject* event = operation->event;
  if (!has(event)) return 0;
  Py_INCREF(event);
  const int found = ask(event, names->query);
  Py_DECREF(event);
  if (found == 1) Py_CLEAR(operation->held);
  return found;
}

PyObject* in_flight_is_over(PyObject* self, PyObject* /*none*/) {
  const int found = is_over(reinterpret_cast<InFlight*>(self));
  return found < 0 ? nullptr : PyBool_FromLong(found);
}

PyObject* in_flight_release(PyObject* self, PyObject* /*none*/) {
  Py_CLEAR(reinterpret_cast<InFlight*>(self)->held);
  Py_RETURN_NONE;
}

PyObject* in_flight_fail(PyObject* self, PyObject* error) {
  auto* operation = reinterpret_cast<InFlight*>(self);
  if (!has(operation->error)) set(&operation->error, error);
  Py_RETURN_NONE;
}

PyObject* in_flight_begin(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  if (!check_count("InFlight.begin", count, 2, 2)) return nullptr;
  const long long sequence = PyLong_AsLongLong(values[0]);
  if (sequence == -1 && PyErr_Occurred() != nullptr) return nullptr;
  const long long record = PyLong_AsLongLong(values[1]);
  if (record == -1 && PyErr_Occurred() != nullptr) return nullptr;
  begin_in_flight(reinterpret_cast<InFlight*>(self), sequence, record);
  Py_RETURN_NONE;
}

template <typename Function>
PyCFunction plain(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

#define MEMBER(type, struct, name, flags) {#name, type, offsetof(struct, name), flags, nullptr}
PyMemberDef in_flight_members[] = {
    MEMBER(T_OBJECT, InFlight, event, 0),
    MEMBER(T_OBJECT, InFlight, stream, 0),
    MEMBER(T_OBJECT, InFlight, caller, 0),
    MEMBER(T_OBJECT, InFlight, held, 0),
    MEMBER(T_OBJECT, InFlight, error, 0),
    MEMBER(T_OBJECT, InFlight, text, READONLY),
    MEMBER(T_OBJECT, InFlight, messages, 0),
    MEMBER(T_OBJECT, InFlight, late, 0),
    MEMBER(T_OBJECT, InFlight, engine, READONLY),
    MEMBER(T_ULONGLONG, InFlight, fingerprint, READONLY),
    MEMBER(T_LONGLONG, InFlight, sequence, READONLY),
    MEMBER(T_LONGLONG, InFlight, record, READONLY),
    MEMBER(T_LONGLONG, InFlight, site, READONLY),
    MEMBER(T_LONGLONG, InFlight, sent_bytes, 0),
    MEMBER(T_LONGLONG, InFlight, received_bytes, 0),
    MEMBER(T_DOUBLE, InFlight, started, READONLY),
    MEMBER(T_DOUBLE, InFlight, timeout_s, READONLY),
    {},
};

PyMethodDef in_flight_methods[] = {
    {"begin", plain(in_flight_begin), METH_FASTCALL,
     "begin($self, sequence, record, /)\n--\n\nNotes that the operation goes into the stream now, "
     "by its number and the recorder's entry."},
    {"is_over", in_flight_is_over, METH_NOARGS,
     "is_over($self, /)\n--\n\nWhether the stream has been given all of the operation and has come "
     "past it, which lets go of its tensors."},
    {"release", in_flight_release, METH_NOARGS,
     "release($self, /)\n--\n\nLets go of the operation's tensors."},
    {"fail", in_flight_fail, METH_O,
     "fail($self, error, /)\n--\n\nNotes why the operation's results will not be right."},
    {},
};

PyType_Slot in_flight_slots[] = {
    {Py_tp_doc, const_cast<char*>("InFlight(text, fingerprint, site, timeout_s, held=(), /)\n--\n\n"
                                  "An operation in flight.")},
    {Py_tp_new, reinterpret_cast<void*>(in_flight_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(in_flight_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(in_flight_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(in_flight_clear)},
    {Py_tp_members, in_flight_members},
    {Py_tp_methods, in_flight_methods},
    {},
};

PyType_Spec in_flight_spec = {"tritondt._C.InFlight", sizeof(InFlight), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, in_flight_slots};

// Engine ------------------------------------------------------------------------------------------

StreamEngine* engine_of(PyObject* self) { return reinterpret_cast<StreamEngine*>(self); }

// False with a Python error.
bool read_recorder(PyObject* given, std::shared_ptr<FlightRecorder>* recorder) {
  if (given == Py_None) return true;
  try {
    *recorder = py::handle(given).cast<RecorderHandle&>().recorder;
    return true;
  } catch (const py::cast_error&) {
    PyErr_Format(PyExc_TypeError, "a FlightRecorder or None is taken, not %.100s",
                 Py_TYPE(given)->tp_name);
    return false;
  }
}

PyObject* engine_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject *streams = nullptr, *stream = nullptr, *given = Py_None;
  std::shared_ptr<FlightRecorder> recorder;
  if (!PyArg_ParseTuple(args, "OO|O", &streams, &stream, &given)) return nullptr;
  if (!read_recorder(given, &recorder)) return nullptr;
  auto* made = reinterpret_cast<StreamEngine*>(type->tp_alloc(type, 0));
  if (made == nullptr) return nullptr;
  made->under_way = new std::deque<InFlight*>;
  made->recorder = new std::shared_ptr<FlightRecorder>(std::move(recorder));
  set(&made->streams, streams);
  set(&made->stream, stream);
  set(&made->target, stream);
  return reinterpret_cast<PyObject*>(made);
}

template <typename Visit>
int each_slot(StreamEngine* self, const Visit& visit) {
  for (PyObject** slot :
       {&self->streams, &self->stream, &self->target, &self->passed, &self->latest, &self->end,
        &self->waiter, &self->waited, &self->on_late}) {
    if (const int found = visit(slot); found != 0) return found;
  }
  return 0;
}

int engine_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  auto* engine = reinterpret_cast<StreamEngine*>(self);
  for (InFlight* each : *engine->under_way) Py_VISIT(each);
  return each_slot(
      engine, [visit, arg](PyObject** slot) { return *slot == nullptr ? 0 : visit(*slot, arg); });
}

int engine_clear(PyObject* self) {
  auto* engine = reinterpret_cast<StreamEngine*>(self);
  std::deque<InFlight*> dropped;
  dropped.swap(*engine->under_way);
  for (InFlight* each : dropped) Py_DECREF(each);
  return each_slot(engine, clear_slot);
}

void engine_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  engine_clear(self);
  auto* engine = reinterpret_cast<StreamEngine*>(self);
  delete engine->under_way;
  delete engine->recorder;
  type->tp_free(self);
  Py_DECREF(type);
}

// Whether what `stream` is given now begins after the latest call's end by itself.
bool comes_after(const StreamEngine* engine, const PyObject* stream) {
  if (engine->end == nullptr || stream == engine->latest) return true;
  return stream == engine->waiter && engine->end == engine->waited;
}

bool let_wait(StreamEngine* engine, PyObject* stream) {
  if (comes_after(engine, stream)) return true;
  const py::object end = py::reinterpret_borrow<py::object>(engine->end);
  if (!call(stream, names->wait_event, end.ptr())) return false;
  set(&engine->waiter, stream);
  set(&engine->waited, end.ptr());
  return true;
}

// An event of a graph is the graph's, and is never used again.
bool follow_in_graph(PyObject* stream, PyObject* other) {
  const py::object event =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(other, names->record_event));
  return event && call(stream, names->wait_event, event.ptr());
}

PyObject* engine_begin(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  if (!check_count("StreamEngine.begin", count, 1, 3)) return nullptr;
  StreamEngine* engine = engine_of(self);
  InFlight* operation = in_flight_of(values[0]);
  if (operation == nullptr) return nullptr;
  const int is_synchronous = count > 1 ? PyObject_IsTrue(values[1]) : 0;
  if (is_synchronous < 0) return nullptr;
  PyObject* stream = begin(engine, operation, is_synchronous != 0, count > 2 ? values[2] : nullptr);
  return stream == nullptr ? nullptr : Py_NewRef(stream);
}

PyObject* engine_end(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  if (!check_count("StreamEngine.end", count, 2, 2)) return nullptr;
  StreamEngine* engine = engine_of(self);
  InFlight* operation = in_flight_of(values[0]);
  if (operation == nullptr) return nullptr;
  if (!end(engine, operation, values[1])) return nullptr;
  Py_RETURN_NONE;
}

PyObject* engine_wait(PyObject* self, PyObject* argument) {
  StreamEngine* engine = engine_of(self);
  InFlight* operation = in_flight_of(argument);
  if (operation == nullptr) return nullptr;
  if (!wait_for(engine, operation)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* engine_let_wait(PyObject* self, PyObject* stream) {
  StreamEngine* engine = engine_of(self);
  if (!let_wait(engine, stream)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* engine_note_end(PyObject* self, PyObject* /*none*/) {
  StreamEngine* engine = engine_of(self);
  const py::object target = py::reinterpret_borrow<py::object>(engine->target);
  PyObject* event = PyObject_CallMethodNoArgs(target.ptr(), names->record_event);
  if (event == nullptr) return nullptr;
  set(&engine->latest, target.ptr());
  set(&engine->end, event);
  return event;
}

bool reap(StreamEngine* engine) {
  std::deque<InFlight*>& under_way = *engine->under_way;
  while (!under_way.empty()) {
    InFlight* first = under_way.front();
    const auto kept = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(first));
    const bool has_passed = has(first->event) && first->event == engine->passed;
    const int found = has_passed ? 1 : is_over(first);
    if (found < 0) return false;
    if (found == 0) return true;
    // Another thread may have come meanwhile.
    if (under_way.empty() || under_way.front() != first) continue;
    under_way.pop_front();
    Py_DECREF(first);
    if (has(first->late) && has(engine->on_late)) {
      PyObject* told = PyObject_CallOneArg(engine->on_late, kept.ptr());
      if (told == nullptr) return false;
      Py_DECREF(told);
    }
    if (*engine->recorder != nullptr) {
      (*engine->recorder)
          ->end(first->record, FlightState::kDone, -1, first->sent_bytes, first->received_bytes);
    }
  }
  return true;
}

PyObject* engine_reap(PyObject* self, PyObject* /*none*/) {
  StreamEngine* engine = engine_of(self);
  if (!reap(engine)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* engine_watch(PyObject* self, PyObject* argument) {
  StreamEngine* engine = engine_of(self);
  InFlight* operation = in_flight_of(argument);
  if (operation == nullptr || !watch(engine, operation)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* engine_under_way(PyObject* self, PyObject* /*none*/) {
  StreamEngine* engine = engine_of(self);
  PyObject* made = PyList_New(0);
  for (InFlight* each : *engine->under_way) {
    if (made != nullptr && PyList_Append(made, reinterpret_cast<PyObject*>(each)) != 0) {
      Py_CLEAR(made);
    }
  }
  return made;
}

PyMemberDef engine_members[] = {
    MEMBER(T_OBJECT, StreamEngine, streams, READONLY),
    MEMBER(T_OBJECT, StreamEngine, stream, READONLY),
    MEMBER(T_OBJECT, StreamEngine, target, 0),
    MEMBER(T_OBJECT, StreamEngine, passed, 0),
    MEMBER(T_OBJECT, StreamEngine, on_late, 0),
    MEMBER(T_LONGLONG, StreamEngine, sequence, 0),
    MEMBER(T_BOOL, StreamEngine, is_capturing, READONLY),
    {},
};
#undef MEMBER

PyMethodDef engine_methods[] = {
    {"begin", plain(engine_begin), METH_FASTCALL,
     "begin($self, operation, is_synchronous=False, ready=None, /)\n--\n\nThe stream that an "
     "operation goes into, which has been given waits for all that it comes after."},
    {"end", plain(engine_end), METH_FASTCALL,
     "end($self, operation, stream, /)\n--\n\nNotes that `stream` has been given all of an "
     "operation, and nothing after it so far."},
    {"wait", engine_wait, METH_O,
     "wait($self, operation, /)\n--\n\nLets the calling thread's current stream wait for an "
     "operation, which is in a stream; the host does not."},
    {"let_wait", engine_let_wait, METH_O,
     "let_wait($self, stream, /)\n--\n\nLets `stream` wait for the latest operation's end."},
    {"note_end", engine_note_end, METH_NOARGS,
     "note_end($self, /)\n--\n\nThe end so far of the operation that is put into `target`, for one "
     "that has no other."},
    {"watch", engine_watch, METH_O,
     "watch($self, operation, /)\n--\n\nWatches an operation that is about to be put into the "
     "stream, and lets go of those that are over."},
    {"reap", engine_reap, METH_NOARGS,
     "reap($self, /)\n--\n\nRecords operations that the stream has come past as done; not while a "
     "graph is made, when nobody may ask."},
    {"under_way", engine_under_way, METH_NOARGS,
     "under_way($self, /)\n--\n\nThe operations that are watched, the oldest first."},
    {},
};

PyType_Slot engine_slots[] = {
    {Py_tp_doc,
     const_cast<char*>("StreamEngine(streams, stream, recorder=None, /)\n--\n\nThe order "
                       "of one communicator's calls in the streams of a device.")},
    {Py_tp_new, reinterpret_cast<void*>(engine_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(engine_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(engine_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(engine_clear)},
    {Py_tp_members, engine_members},
    {Py_tp_methods, engine_methods},
    {},
};

PyType_Spec engine_spec = {"tritondt._C.StreamEngine", sizeof(StreamEngine), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
                           engine_slots};

PyTypeObject* add_type(py::module_* module, const char* name, PyType_Spec* spec) {
  PyObject* made = PyType_FromSpec(spec);
  if (made == nullptr) throw py::error_already_set();
  module->add_object(name, py::reinterpret_borrow<py::object>(made));
  return reinterpret_cast<PyTypeObject*>(made);
}

}  // namespace

InFlight* new_in_flight(PyObject* text, unsigned long long fingerprint, long long site,
                        double timeout_s) {
  auto* made = reinterpret_cast<InFlight*>(in_flight_type->tp_alloc(in_flight_type, 0));
  if (made == nullptr) return nullptr;
  set(&made->text, text);
  made->fingerprint = fingerprint;
  made->site = site;
  made->timeout_s = timeout_s;
  made->record = -1;
  return made;
}

void begin_in_flight(InFlight* operation, long long sequence, long long record) {
  operation->sequence = sequence;
  operation->record = record;
  operation->started = static_cast<double>(monotonic_ns()) * 1e-9;
}

bool watch(StreamEngine* engine, InFlight* operation) {
  if (!reap(engine)) return false;
  Py_INCREF(operation);
  engine->under_way->push_back(operation);
  return true;
}

PyObject* begin(StreamEngine* engine, InFlight* operation, bool is_synchronous, PyObject* ready) {
  PyObject *streams = engine->streams, *own = engine->stream;
  const int is_capturing = ask(streams, names->is_capturing);
  if (is_capturing < 0) return nullptr;
  engine->is_capturing = static_cast<char>(is_capturing);
  if (has(ready) && is_capturing == 0) {
    if (!call(own, names->wait_event, ready)) return nullptr;
    return let_wait(engine, own) ? own : nullptr;
  }
  PyObject* caller = PyObject_CallMethodNoArgs(streams, names->current);
  if (caller == nullptr) return nullptr;
  std::swap(operation->caller, caller);
  Py_XDECREF(caller);
  caller = operation->caller;
  if (is_capturing != 0) return follow_in_graph(own, caller) ? own : nullptr;
  if (is_synchronous) return let_wait(engine, caller) ? caller : nullptr;
  if (!call(streams, names->follow, own, caller)) return nullptr;
  if (comes_after(engine, caller)) return own;
  return let_wait(engine, own) ? own : nullptr;
}

bool end(StreamEngine* engine, InFlight* operation, PyObject* stream) {
  PyObject* event = PyObject_CallMethodObjArgs(engine->streams, names->record, stream, nullptr);
  if (event == nullptr) return false;
  set(&operation->engine, reinterpret_cast<PyObject*>(engine));
  set(&operation->stream, stream);
  set(&operation->event, event);
  if (engine->is_capturing == 0) {
    set(&engine->latest, stream);
    set(&engine->end, event);
  }
  Py_DECREF(event);
  return true;
}

bool wait_for(StreamEngine* engine, InFlight* operation) {
  const auto waiter =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(engine->streams, names->current));
  if (!waiter) return false;
  if (waiter.ptr() != operation->stream) {
    const auto event = py::reinterpret_steal<py::object>(value_of(operation->event));
    if (!call(waiter.ptr(), names->wait_event, event.ptr())) return false;
    if (event.ptr() == engine->end) {
      set(&engine->waiter, waiter.ptr());
      set(&engine->waited, event.ptr());
    }
  }
  // Waited for on another stream than the issuer's, what is freed could be written to before it has
  // been read.
  if (waiter.ptr() == operation->caller) Py_CLEAR(operation->held);
  return true;
}

InFlight* as_in_flight(PyObject* object) {
  return PyObject_TypeCheck(object, in_flight_type) != 0 ? reinterpret_cast<InFlight*>(object)
                                                         : nullptr;
}

bool is_stream_engine(PyObject* object) { return PyObject_TypeCheck(object, engine_type) != 0; }

void bind_stream_engine(py::module_* module) {
  static const Names made;
  names = &made;
  in_flight_type = add_type(module, "InFlight", &in_flight_spec);
  engine_type = add_type(module, "StreamEngine", &engine_spec);
}

}  // namespace tritondt
