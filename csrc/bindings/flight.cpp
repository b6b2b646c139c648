#include "bindings/flight.h"

#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/clock.h"

namespace py = pybind11;

namespace tritondt {
namespace {

// The methods that every operation calls are plain C functions on the class that pybind11
// makes: its own dispatch takes 0.3 us a call, theirs 0.05.
RecorderHandle* handle_of(PyObject* self) {
  auto* handle = static_cast<RecorderHandle*>(
      reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().value_ptr());
  if (handle == nullptr) {
    PyErr_SetString(PyExc_TypeError, "FlightRecorder.__init__ was not called");
  }
  return handle;
}

bool check_count(const char* name, Py_ssize_t count, Py_ssize_t least, Py_ssize_t most) {
  if (count >= least && count <= most) return true;
  PyErr_Format(PyExc_TypeError, "FlightRecorder.%s takes %zd to %zd arguments, but %zd were given",
               name, least, most, count);
  return false;
}

// Reads arguments one by one; a value that does not fit sets a Python error, seen by `failed`.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : values_(values), count_(count) {}

  std::int64_t integer(Py_ssize_t position, std::int64_t otherwise = 0) {
    if (position >= count_ || failed_) return otherwise;
    const long long value = PyLong_AsLongLong(values_[position]);
    failed_ = value == -1 && PyErr_Occurred() != nullptr;
    return value;
  }

  // The number of a text, or a rank; -1 for none.
  std::int32_t number(Py_ssize_t position, std::int32_t otherwise = -1) {
    const std::int64_t value = integer(position, otherwise);
    if (value < -1 || value > INT32_MAX) {
      fail(PyExc_ValueError, position, "from -1 to 2^31 - 1");
    }
    return static_cast<std::int32_t>(value);
  }

  std::uint64_t fingerprint(Py_ssize_t position) {
    if (failed_) return 0;
    const unsigned long long value = PyLong_AsUnsignedLongLong(values_[position]);
    failed_ = value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr;
    return value;
  }

  FlightState state(Py_ssize_t position) {
    const std::int64_t value = integer(position);
    if (value < 0 || value >= static_cast<std::int64_t>(kFlightStates.size())) {
      fail(PyExc_ValueError, position, "a position in STATES");
    }
    return static_cast<FlightState>(value);
  }

  StepKind step(Py_ssize_t position) {
    const std::int64_t value = integer(position);
    if (value < 0 || value >= static_cast<std::int64_t>(kNumSteps)) {
      fail(PyExc_ValueError, position, "a position in STEPS");
    }
    return static_cast<StepKind>(value);
  }

  bool failed() const { return failed_; }

 private:
  void fail(PyObject* kind, Py_ssize_t position, const char* allowed) {
    if (failed_) return;
    failed_ = true;
    PyErr_Format(kind, "argument %zd is %R; it must be %s", position + 1, values_[position],
                 allowed);
  }

  PyObject* const* values_;
  Py_ssize_t count_;
  bool failed_ = false;
};

PyObject* label(PyObject* self, PyObject* text) {
  Py_ssize_t length = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text, &length);
  if (bytes == nullptr) return nullptr;
  RecorderHandle* handle = handle_of(self);
  if (handle == nullptr) return nullptr;
  return PyLong_FromLong(
      handle->recorder->texts().number({bytes, static_cast<std::size_t>(length)}));
}

PyObject* site(PyObject* self, PyObject* /*none*/) {
  RecorderHandle* handle = handle_of(self);
  if (handle == nullptr) return nullptr;
  const std::int32_t number = handle->sites.find();
  return PyErr_Occurred() != nullptr ? nullptr : PyLong_FromLong(number);
}

PyObject* begin(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  if (!check_count("begin", count, 5, 7)) return nullptr;
  Arguments arguments(values, count);
  const std::int32_t communicator = arguments.number(0);
  const std::int64_t sequence = arguments.integer(1);
  const std::int32_t operation = arguments.number(2);
  const std::uint64_t fingerprint = arguments.fingerprint(3);
  const std::int32_t place = arguments.number(4);
  const FlightState state = count > 5 ? arguments.state(5) : FlightState::kIssued;
  RecorderHandle* handle = arguments.failed() ? nullptr : handle_of(self);
  if (handle == nullptr) return nullptr;
  const std::int64_t record =
      handle->recorder->begin(communicator, sequence, operation, fingerprint, place);
  if (state != FlightState::kIssued) handle->recorder->state(record, state, -1);
  if (count > 6 && StepLog::of_process().is_on()) {
    tell_exchange(handle->recorder, record, sequence, place, values[6]);
  }
  return PyLong_FromLongLong(record);
}

PyObject* step(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  if (!check_count("step", count, 2, 2)) return nullptr;
  Arguments arguments(values, count);
  const std::int64_t record = arguments.integer(0);
  const StepKind kind = arguments.step(1);
  RecorderHandle* handle = arguments.failed() ? nullptr : handle_of(self);
  if (handle == nullptr) return nullptr;
  handle->recorder->step(record, kind);
  Py_RETURN_NONE;
}

PyObject* leave(PyObject* self, PyObject* record) {
  const long long number = PyLong_AsLongLong(record);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  RecorderHandle* handle = handle_of(self);
  if (handle == nullptr) return nullptr;
  handle->recorder->leave(number);
  Py_RETURN_NONE;
}

PyObject* state(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  if (!check_count("state", count, 2, 3)) return nullptr;
  Arguments arguments(values, count);
  const std::int64_t record = arguments.integer(0);
  const FlightState found = arguments.state(1);
  const std::int32_t peer = arguments.number(2);
  RecorderHandle* handle = arguments.failed() ? nullptr : handle_of(self);
  if (handle == nullptr) return nullptr;
  handle->recorder->state(record, found, peer);
  Py_RETURN_NONE;
}

PyObject* end(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  if (!check_count("end", count, 2, 5)) return nullptr;
  Arguments arguments(values, count);
  const std::int64_t record = arguments.integer(0);
  const FlightState found = arguments.state(1);
  const std::int32_t error = arguments.number(2);
  const std::int64_t sent_bytes = arguments.integer(3);
  const std::int64_t received_bytes = arguments.integer(4);
  RecorderHandle* handle = arguments.failed() ? nullptr : handle_of(self);
  if (handle == nullptr) return nullptr;
  handle->recorder->end(record, found, error, sent_bytes, received_bytes);
  Py_RETURN_NONE;
}

template <typename Function>
PyCFunction plain(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

std::array<PyMethodDef, 7> methods = {{
    {"label", label, METH_O,
     "label($self, text, /)\n--\n\nThe number of `text`, equal for equal texts; kept for good."},
    {"site", site, METH_NOARGS,
     "site($self, /)\n--\n\nThe number of \"file:line (function)\" of the innermost Python frame "
     "that is not internal; -1 where there is none."},
    {"begin", plain(begin), METH_FASTCALL,
     "begin($self, communicator, sequence, operation, fingerprint, site, state=0, exchange=None, "
     "/)\n--\n\nRecords an operation as issued now, or as that far already; the number names it in "
     "what follows. With `exchange`, anything that says which, it is one of the calling thread, "
     "whose steps StepTimes hears of."},
    {"state", plain(state), METH_FASTCALL,
     "state($self, record, state, peer=-1, /)\n--\n\nHow far an operation is, and for which rank "
     "it "
     "waits; ignored once overwritten."},
    {"step", plain(step), METH_FASTCALL,
     "step($self, record, step, /)\n--\n\nAn exchange comes to its next step, a position in "
     "STEPS, and to the state of it; ignored once overwritten."},
    {"leave", leave, METH_O,
     "leave($self, record, /)\n--\n\nThe host is through with an operation, which a stream ends."},
    {"end", plain(end), METH_FASTCALL,
     "end($self, record, state, error_label=-1, sent_bytes=0, received_bytes=0, /)\n--\n\nEnds an "
     "operation; ignored once overwritten."},
}};

py::object text_or_none(const FlightRecorder& recorder, std::int32_t number) {
  const std::string* text = recorder.texts().text(number);
  if (text == nullptr) return py::none();
  return py::str(*text);
}

py::dict make_dict(const FlightRecorder& recorder, const FlightEntry& entry) {
  const auto time = [&recorder](std::int64_t ns) -> py::object {
    if (ns == 0) return py::none();
    return py::float_(recorder.wall_seconds(ns));
  };
  py::dict made;
  made["number"] = entry.number;
  made["communicator"] = text_or_none(recorder, entry.communicator);
  made["sequence"] = entry.sequence;
  made["operation"] = text_or_none(recorder, entry.operation);
  made["fingerprint"] = entry.fingerprint;
  made["state"] = kFlightStates[static_cast<std::size_t>(entry.state)];
  made["site"] = text_or_none(recorder, entry.site);
  made["peer"] = entry.peer;
  made["issued_at"] = time(entry.issued_ns);
  made["started_at"] = time(entry.started_ns);
  made["ended_at"] = time(entry.ended_ns);
  made["error"] = text_or_none(recorder, entry.error);
  made["sent_bytes"] = entry.sent_bytes;
  made["received_bytes"] = entry.received_bytes;
  py::dict steps;
  for (std::size_t i = 0; i < kNumSteps; ++i) {
    if (entry.step_ns[i] != 0) steps[kStepKinds[i]] = time(entry.step_ns[i]);
  }
  made["steps"] = steps;
  return made;
}

py::list last(const RecorderHandle& handle, std::int64_t count) {
  py::list made;
  for (const FlightEntry& entry : handle.recorder->last(count)) {
    made.append(make_dict(*handle.recorder, entry));
  }
  return made;
}

std::string text_of(const RecorderHandle& handle, std::int32_t number) {
  const std::string* text = handle.recorder->texts().text(number);
  if (text == nullptr) {
    throw py::index_error("text " + std::to_string(number) +
                          " was asked for; this recorder never gave that number");
  }
  return *text;
}

void dump(const RecorderHandle& handle, const std::string& path, const std::string& reason) {
  const py::gil_scoped_release released;
  handle.recorder->dump(path, reason);
}

thread_local bool runs_queue = false;

// An exchange that somebody was listening to when it began.
struct ToldExchange {
  std::int64_t number;  // in the log of steps
  std::shared_ptr<FlightRecorder> recorder;
  std::int64_t sequence;
  std::int32_t site;
  bool is_queued;  // begun by a queue's thread
  py::object record;
};

// Those that are kept, by the GIL's leave; never destroyed, as the interpreter may be gone first.
std::vector<ToldExchange>& told_exchanges() {
  static auto* const told = new std::vector<ToldExchange>;
  return *told;
}

int num_listeners = 0;

// What the process's exchanges do from now on, until `close`.
class StepTimes {
 public:
  explicit StepTimes(std::size_t most) {
    StepLog::of_process().listen(most);
    ++num_listeners;
    first_step_ = StepLog::of_process().num_steps();
    first_exchange_ = told_exchanges().size();
    dropped_before_ = StepLog::of_process().num_dropped();
  }
  ~StepTimes() { close(); }
  StepTimes(const StepTimes&) = delete;
  StepTimes& operator=(const StepTimes&) = delete;

  void close() {
    if (!is_open_) return;
    StepLog& log = StepLog::of_process();
    num_dropped_ = log.num_dropped() - dropped_before_;
    steps_ = log.steps(first_step_);
    std::vector<ToldExchange>& told = told_exchanges();
    exchanges_.assign(told.begin() + static_cast<std::ptrdiff_t>(first_exchange_), told.end());
    is_open_ = false;
    log.leave();
    if (--num_listeners == 0) std::exchange(told, {});
  }

  // (exchange, kind, start, end, thread) of each step.
  py::list steps() const {
    check_closed();
    py::list made;
    for (const TimedStep& step : steps_) {
      made.append(py::make_tuple(step.exchange, kStepKinds[static_cast<std::size_t>(step.kind)],
                                 step.started_ns, step.ended_ns, step.thread));
    }
    return made;
  }

  // By their numbers: (rank, sequence, site, is_queued, record).
  py::dict exchanges() const {
    check_closed();
    py::dict made;
    for (const ToldExchange& told : exchanges_) {
      made[py::int_(told.number)] =
          py::make_tuple(told.recorder->rank(), told.sequence,
                         text_or_none(*told.recorder, told.site), told.is_queued, told.record);
    }
    return made;
  }

  std::size_t num_dropped() const {
    check_closed();
    return num_dropped_;
  }

 private:
  void check_closed() const {
    if (is_open_)
      throw std::logic_error("steps are still noted; close StepTimes before it is asked");
  }

  bool is_open_ = true;
  std::size_t first_step_, first_exchange_, dropped_before_, num_dropped_ = 0;
  std::vector<TimedStep> steps_;
  std::vector<ToldExchange> exchanges_;
};

void bind_step_times(py::module_* module) {
  py::class_<StepTimes>(*module, "StepTimes",
                        "When the steps of this process's exchanges run, from now until `close`.")
      .def(py::init<std::size_t>(), py::arg("most"), "Keeps at most so many steps.")
      .def("close", &StepTimes::close, "Listens no more; what was heard can be asked for.")
      .def("steps", &StepTimes::steps,
           "(exchange, kind, start, end, thread) of each step, in ns of CLOCK_MONOTONIC; that of "
           "kind \"exchange\" is all of one, as far as the host takes part.")
      .def("exchanges", &StepTimes::exchanges,
           "(rank, sequence, site, is_queued, exchange) of each, by its number; `exchange` is what "
           "FlightRecorder.begin was given.")
      .def_property_readonly("num_dropped", &StepTimes::num_dropped,
                             "Steps and exchanges for which there was no room.");
  module->def(
      "note_queue_thread", [] { runs_queue = true; },
      "Exchanges that the calling thread begins are a queue's, from now on.");
}

}  // namespace

void tell_exchange(const std::shared_ptr<FlightRecorder>& recorder, std::int64_t number,
                   std::int64_t sequence, std::int32_t site, PyObject* record) {
  const std::int64_t exchange = StepLog::of_process().begin(recorder.get(), number, monotonic_ns());
  if (exchange < 0) return;
  told_exchanges().push_back(
      {exchange, recorder, sequence, site, runs_queue, py::reinterpret_borrow<py::object>(record)});
}

void bind_flight_recorder(py::module_* module) {
  py::class_<RecorderHandle> recorder(*module, "FlightRecorder",
                                      "The last operations of one rank, in a ring.");
  recorder
      .def(py::init([](std::int64_t rank, std::int64_t world_size, std::int64_t capacity) {
             return std::make_unique<RecorderHandle>(
                 std::make_shared<FlightRecorder>(rank, world_size, capacity));
           }),
           py::arg("rank"), py::arg("world_size"), py::arg("capacity") = 2000)
      .def(
          "set_internal",
          [](RecorderHandle& handle, std::vector<std::string> prefixes) {
            handle.sites.set_internal(std::move(prefixes));
          },
          py::arg("prefixes"), "Frames of files that begin so are no call sites, from now on.")
      .def("last", &last, py::arg("n"), "The last `n` operations, the oldest first.")
      .def(
          "entries",
          [](const RecorderHandle& handle) { return last(handle, handle.recorder->capacity()); },
          "All operations that are kept, the oldest first.")
      .def("label_text", &text_of, py::arg("label"), "The text that `label` numbered so.")
      .def("site_text", &text_of, py::arg("site"), "The text that `site` numbered so.")
      .def("dump", &dump, py::arg("path"), py::arg("reason") = "asked",
           "Writes everything to `path` as JSON, in one step; OSError where that fails.")
      .def_property_readonly("rank",
                             [](const RecorderHandle& handle) { return handle.recorder->rank(); })
      .def_property_readonly(
          "world_size", [](const RecorderHandle& handle) { return handle.recorder->world_size(); })
      .def_property_readonly(
          "capacity", [](const RecorderHandle& handle) { return handle.recorder->capacity(); });
  for (PyMethodDef& method : methods) {
    PyObject* made = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(recorder.ptr()), &method);
    if (made == nullptr) throw py::error_already_set();
    recorder.attr(method.ml_name) = py::reinterpret_steal<py::object>(made);
  }
  py::tuple states(kFlightStates.size());
  for (std::size_t i = 0; i < kFlightStates.size(); ++i) states[i] = py::str(kFlightStates[i]);
  module->attr("STATES") = states;
  py::tuple steps(kNumSteps);
  for (std::size_t i = 0; i < kNumSteps; ++i) steps[i] = py::str(kStepKinds[i]);
  module->attr("STEPS") = steps;
  bind_step_times(module);
}

}  // namespace tritondt
