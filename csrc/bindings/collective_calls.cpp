#include "bindings/collective_calls.h"

#include <datetime.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/dlpack.h"
#include "bindings/flight.h"
#include "bindings/nccl.h"
#include "bindings/plain_method.h"
#include "bindings/stream_engine.h"
#include "cpu/process.h"
#include "nccl/calls.h"

namespace py = pybind11;

namespace tritondt {
namespace {

using Key = std::vector<std::int64_t>;

struct HashOfKey {
  std::size_t operator()(const Key& key) const {
    std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a's, by words
    for (const std::int64_t each : key) {
      hash = (hash ^ static_cast<std::uint64_t>(each)) * 0x100000001b3;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

// An operation as `GroupCalls` runs it. Without calls it is none: Python's way is the one.
struct Kept {
  py::object asked, native;  // what its works keep; what holds the calls
  const nccl::CallSlices* calls = nullptr;
  py::str text;
  std::uint64_t fingerprint = 0;
  std::int32_t label = -1;
  std::size_t results_start = 0, results_stop = 0;
};

// Kept operations and calls that have none: about 200 bytes each.
constexpr std::size_t kMaxKept = 16384;

// Names of attributes, made once.
struct Names {
  PyObject* calls = PyUnicode_InternFromString("_calls");
  PyObject* reduce_op = PyUnicode_InternFromString("reduceOp");
  PyObject* root = PyUnicode_InternFromString("rootRank");
  PyObject* timeout = PyUnicode_InternFromString("timeout");
  PyObject* async_op = PyUnicode_InternFromString("asyncOp");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* cuda_stream = PyUnicode_InternFromString("cuda_stream");
  PyObject* in_flight = PyUnicode_InternFromString("in_flight");
  PyObject* asked = PyUnicode_InternFromString("_asked");
  PyObject* results = PyUnicode_InternFromString("_results");
  PyObject* profiler_on = PyUnicode_InternFromString("_is_profiler_enabled");
};
const Names* names = nullptr;

// How many there are who want every call to go Python's way, where they record it.
int num_recordings = 0;

py::object attribute(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object, name);
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

// None where an older torch has no such attribute.
py::object optional(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object, name);
  if (found != nullptr) return py::reinterpret_steal<py::object>(found);
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
  PyErr_Clear();
  return py::none();
}

std::int64_t integer(PyObject* object) {
  const long long found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found;
}

// How a method of the group is called.
struct Signature {
  py::object key_of;       // Python's key of such a call
  std::vector<int> order;  // places of the arguments with tensors, those of this rank's own first
  std::size_t num_arguments;
  bool has_op, has_root;
  int number;
};

// What a call gives, until it is found to be none for C. Tensors are its own: while Python runs,
// another thread may change the lists that they are from.
struct Given {
  Key key;
  std::vector<py::object> tensors;
  std::vector<std::uintptr_t> addresses;
};

// Where operations go: a stream of Python's, and what is asked of it each time.
struct Way {
  const py::object stream, engine, recorder_object, acquire, release, work_class, init, find;
  const CommunicatorPtr native;
  const std::shared_ptr<FlightRecorder> recorder;
  CallSites* const sites;
  const std::int32_t label;
};
using WayPtr = std::shared_ptr<const Way>;

// Holds the lock of a stream, in which one operation at a time is put.
class Turn {
 public:
  explicit Turn(const Way& way) : way_(way) {
    PyObject* none = PyObject_CallNoArgs(way_.acquire.ptr());
    if (none == nullptr) throw py::error_already_set();
    Py_DECREF(none);
  }
  ~Turn() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(way_.release.ptr()));
    PyErr_Restore(type, value, trace);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  const Way& way_;
};

}  // namespace

// The collectives of one rank of a process group that go by NCCL: each whole in one call, once it
// was asked for before; for tensors known by DLPack's fields.
class GroupCalls {
 public:
  GroupCalls(py::tuple tensor_classes, py::object profiler)
      : tensor_classes_(std::move(tensor_classes)), profiler_(std::move(profiler)) {
    const py::object tensor_class = tensor_classes_[0];
    api_ = dlpack::exchange_api_of(tensor_class.ptr());
    if (api_ == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  }

  // Where operations go from now on. `stream` hears of captures and of what goes wrong.
  void open(py::object stream, py::object engine, CommunicatorPtr native, py::object recorder,
            std::int32_t label, py::object turn, py::object work_class, py::object token,
            py::object find) {
    if (!is_stream_engine(engine.ptr())) throw py::type_error("calls take a StreamEngine");
    dlpack::DLTensor tensor = {};
    if (api_ == nullptr || !is_known(token.ptr()) || !view(token.ptr(), &tensor)) return;
    if (way_ == nullptr || engine.ptr() != way_->engine.ptr())
      forget();  // labels are of a recorder
    auto& handle = recorder.cast<RecorderHandle&>();
    const py::object init = work_class.attr("__mro__")[py::int_(1)].attr("__init__");
    way_ = std::make_shared<const Way>(
        Way{std::move(stream), std::move(engine), recorder, turn.attr("acquire"),
            turn.attr("release"), std::move(work_class), init, std::move(find), std::move(native),
            handle.recorder, &handle.sites, label});
    device_ = tensor.device;
    process_ = process_number();
    is_open_ = true;
  }

  void close() { is_open_ = false; }

  // As `close`, for good: what holds the group is let go of.
  void end() {
    close();
    forget();
    const WayPtr dropped = std::move(way_);
  }

  void forget() {
    const auto dropped = std::exchange(kept_, {});  // what is dropped may run Python
  }

  bool is_open() const { return is_open_; }

  std::int64_t num_operations = 0;
  double timeout_s = 0;

  // Whether a call may go by C at all.
  bool takes_calls() const {
    if (!is_open_ || num_recordings != 0 || process_ != process_number()) return false;
    PyObject* found = PyObject_GetAttr(profiler_.ptr(), names->profiler_on);
    if (found == nullptr) throw py::error_already_set();
    Py_DECREF(found);
    return found == Py_False;
  }

  // Reads a call; false for what C knows nothing of.
  bool read(const Signature& signature, PyObject* const* arguments, Given* given) const {
    given->key.reserve(24);
    given->key.push_back(signature.number);
    PyObject* options = arguments[signature.num_arguments - 1];
    if (signature.has_op) {
      const Py_hash_t number = PyObject_Hash(attribute(options, names->reduce_op).ptr());
      if (number == -1) throw py::error_already_set();
      given->key.push_back(number);
    }
    if (signature.has_root) {
      given->key.push_back(integer(attribute(options, names->root).ptr()));
    }
    for (const int place : signature.order) {
      if (!add(arguments[place], 0, given)) return false;
    }
    return !given->tensors.empty();
  }

  const Kept* find(const Key& key) const {
    const auto found = kept_.find(key);
    return found == kept_.end() ? nullptr : &found->second;
  }

  // Keeps what Python has for such a call, which it has just run.
  void keep(const Signature& signature, PyObject* const* arguments, const Given& given) {
    if (!is_open_) return;
    const WayPtr way = way_;
    const py::tuple tensors = tuple_of(given.tensors, 0, given.tensors.size());
    py::tuple all(signature.num_arguments);
    for (std::size_t i = 0; i < signature.num_arguments; ++i) {
      all[i] = py::reinterpret_borrow<py::object>(arguments[i]);
    }
    const py::object found = way->find(signature.key_of, tensors, all);
    Given now;
    // Python has run: lists may have changed under it, and the stream may be another or none.
    if (!read(signature, arguments, &now) || now.key != given.key || !is_open_ || way != way_) {
      return;
    }
    Kept made;
    if (!found.is_none()) {
      const auto parts = found.cast<py::tuple>();
      made.asked = parts[0];
      made.native = parts[1];
      made.calls = &made.native.cast<const nccl::CallSlices&>();
      made.text = parts[2];
      made.fingerprint = parts[3].cast<std::uint64_t>();
      made.results_start = parts[4].cast<std::size_t>();
      made.results_stop = parts[5].cast<std::size_t>();
      made.label = way->recorder->texts().number(made.text.cast<std::string>());
      if (made.results_stop > given.tensors.size() || made.results_start > made.results_stop) {
        throw py::value_error("an operation's results are none of its tensors");
      }
    }
    if (kept_.size() >= kMaxKept) forget();
    kept_.insert_or_assign(given.key, std::move(made));
  }

  // The Work of an operation, which is put into its stream; nothing where that was closed
  // meanwhile, by another thread, which may have dropped what is kept as well.
  py::object issue(Kept kept, const Given& given, PyObject* options) {
    ++num_operations;
    const WayPtr way = way_;
    const double limit_s = timeout_of(options);
    const bool is_synchronous = optional(options, names->async_op).ptr() == Py_False;
    const std::int32_t site = way->sites->find();
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const py::object made = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(
        new_in_flight(kept.text.ptr(), kept.fingerprint, site, limit_s)));
    if (!made) throw py::error_already_set();
    auto* operation = reinterpret_cast<InFlight*>(made.ptr());
    const py::tuple held = tuple_of(given.tensors, 0, given.tensors.size());
    operation->held = Py_NewRef(held.ptr());
    operation->waits_in_stream = 1;
    const bool are_all = kept.results_stop - kept.results_start == held.size();
    const py::object work =
        work_of(*way, made, kept,
                are_all ? held : tuple_of(given.tensors, kept.results_start, kept.results_stop));
    {
      const Turn turn(*way);
      if (!is_open_ || way != way_) {  // since this call has begun
        --num_operations;
        return py::object();
      }
      put(*way, kept, given, operation, work, is_synchronous);
    }
    // At once: nobody need wait for the work to hear of it.
    if (!is_open_) way->stream.attr("check_usable")(kept.text);
    return work;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(profiler_.ptr());
    if (way_ != nullptr) {
      for (const py::object* each :
           {&way_->stream, &way_->engine, &way_->recorder_object, &way_->acquire, &way_->release,
            &way_->work_class, &way_->init, &way_->find}) {
        Py_VISIT(each->ptr());
      }
    }
    for (const auto& [key, kept] : kept_) Py_VISIT(kept.asked.ptr());
    return 0;
  }

 private:
  // A tensor of the group's device that is laid out as C's arrays, a number, or a list of them.
  bool add(PyObject* argument, int depth, Given* given) const {
    if (PyList_CheckExact(argument) || PyTuple_CheckExact(argument)) {
      return depth < 2 && add_list(argument, depth, given);
    }
    if (depth > 0 && PyLong_CheckExact(argument)) {
      int overflow = 0;
      given->key.push_back(PyLong_AsLongLongAndOverflow(argument, &overflow));
      return overflow == 0;  // Python says what is wrong with it
    }
    if (!is_known(argument)) return false;
    // Before the view, which tells of memory that what Python runs may change.
    PyObject* is_negated = PyObject_CallMethodNoArgs(argument, names->is_neg);
    if (is_negated == nullptr) throw py::error_already_set();
    Py_DECREF(is_negated);
    dlpack::DLTensor tensor = {};
    if (is_negated != Py_False || !view(argument, &tensor) || tensor.device.type != device_.type ||
        tensor.device.id != device_.id || tensor.dtype.code == kComplex) {
      return false;
    }
    std::int64_t num_elements = 1;
    for (std::int32_t dim = tensor.num_dims - 1; dim >= 0; --dim) {
      if (tensor.shape[dim] != 1 && tensor.strides[dim] != num_elements) {
        for (std::int32_t each = 0; each < tensor.num_dims; ++each) {
          if (tensor.shape[each] == 0) num_elements = 0;
        }
        if (num_elements != 0) return false;
        break;
      }
      num_elements *= tensor.shape[dim];
    }
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
    if (address == 0 && num_elements != 0) return false;  // its storage was freed under it
    given->key.push_back(num_elements);
    given->key.push_back(tensor.num_dims == 0 ? -1 : tensor.shape[0]);
    given->key.push_back(tensor.dtype.code | tensor.dtype.bits << 8 | tensor.dtype.lanes << 16);
    given->tensors.push_back(py::reinterpret_borrow<py::object>(argument));
    given->addresses.push_back(address);
    return true;
  }

  bool add_list(PyObject* argument, int depth, Given* given) const {
    const Py_ssize_t length = PySequence_Fast_GET_SIZE(argument);
    const std::size_t first = given->tensors.size(), at = given->key.size();
    given->key.push_back(length);
    given->key.push_back(0);
    for (Py_ssize_t i = 0; i < length; ++i) {
      // A mode of torch's functions hears of what tensors are asked, and may change the list.
      if (PySequence_Fast_GET_SIZE(argument) != length) return false;
      const auto each = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(argument, i));
      if (!add(each.ptr(), depth + 1, given)) return false;
    }
    given->key[at + 1] = depth > 0 && lie_end_to_end(*given, first, at + 2) ? 1 : 0;
    return true;
  }

  // Whether a list's tensors are equal parts of one run of memory: calls follow from that.
  static bool lie_end_to_end(const Given& given, std::size_t first, std::size_t at) {
    const std::size_t num = given.tensors.size() - first;
    if (num == 0 || given.key.size() != at + 3 * num) return false;
    const std::int64_t bits = (given.key[at + 2] >> 8 & 0xff) * (given.key[at + 2] >> 16);
    const auto num_bytes = static_cast<std::uintptr_t>(given.key[at] * ((bits + 7) / 8));
    for (std::size_t i = 1; i < num; ++i) {
      if (given.key[at + 3 * i] != given.key[at] ||
          given.key[at + 3 * i + 2] != given.key[at + 2] ||
          given.addresses[first + i] != given.addresses[first] + i * num_bytes) {
        return false;
      }
    }
    return true;
  }

  // A subclass may be anything: what is of no known class exactly is left to Python.
  bool is_known(PyObject* tensor) const {
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    bool found = false;
    for (const py::handle each : tensor_classes_) found |= each.ptr() == type;
    return found;
  }

  bool view(PyObject* tensor, dlpack::DLTensor* out) const {
    if (api_->view(tensor, out) == 0) return true;
    PyErr_Clear();  // a tensor that DLPack has no words for
    return false;
  }

  static py::tuple tuple_of(const std::vector<py::object>& tensors, std::size_t start,
                            std::size_t stop) {
    py::tuple made(stop - start);
    for (std::size_t i = start; i < stop; ++i) {
      PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i - start), Py_NewRef(tensors[i].ptr()));
    }
    return made;
  }

  // The timeout that the call gives, or else the group's, in seconds.
  double timeout_of(PyObject* options) const {
    const py::object asked = optional(options, names->timeout);
    if (asked.is_none()) return timeout_s;
    if (!PyDelta_Check(asked.ptr())) throw py::type_error("a timeout is a timedelta");
    const int days = PyDateTime_DELTA_GET_DAYS(asked.ptr());
    const int seconds = PyDateTime_DELTA_GET_SECONDS(asked.ptr());
    const int us = PyDateTime_DELTA_GET_MICROSECONDS(asked.ptr());
    const double found = days * 86400.0 + seconds + us * 1e-6;
    return found > 0 ? found : timeout_s;
  }

  static py::object work_of(const Way& way, const py::object& in_flight, const Kept& kept,
                            const py::tuple& results) {
    // Without the metaclass, which takes as long as all the rest.
    auto* type = reinterpret_cast<PyTypeObject*>(way.work_class.ptr());
    const auto work =
        py::reinterpret_steal<py::object>(type->tp_new(type, py::tuple().ptr(), nullptr));
    if (!work) throw py::error_already_set();
    const auto none =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(way.init.ptr(), work.ptr()));
    if (!none || PyObject_SetAttr(work.ptr(), names->in_flight, in_flight.ptr()) != 0 ||
        PyObject_SetAttr(work.ptr(), names->asked, kept.asked.ptr()) != 0 ||
        PyObject_SetAttr(work.ptr(), names->results, results.ptr()) != 0) {
      throw py::error_already_set();
    }
    return work;
  }

  static void put(const Way& way, const Kept& kept, const Given& given, InFlight* operation,
                  const py::object& work, bool is_synchronous) {
    auto* engine = reinterpret_cast<StreamEngine*>(way.engine.ptr());
    const auto stream =
        py::reinterpret_borrow<py::object>(begin(engine, operation, is_synchronous, nullptr));
    if (!stream) throw py::error_already_set();
    const auto handle =
        static_cast<std::uintptr_t>(integer(attribute(stream.ptr(), names->cuda_stream).ptr()));
    if (engine->is_capturing != 0) {
      way.stream.attr("note_captured")();
      run(way, kept, given, handle);
    } else {
      const long long sequence = ++engine->sequence;
      const std::int64_t entry =
          way.recorder->begin(way.label, sequence, kept.label, kept.fingerprint, operation->site);
      way.recorder->state(entry, FlightState::kExchanging, -1);
      begin_in_flight(operation, sequence, entry);
      if (!watch(engine, operation)) throw py::error_already_set();
      try {
        run(way, kept, given, handle);
      } catch (const std::exception&) {
        // As Python has it: what it is told of and raises is its matter.
        way.stream.attr("break_off")(work, as_python_error());
        return;
      }
    }
    if (!end_of(engine, operation, stream)) throw py::error_already_set();
  }

  static bool end_of(StreamEngine* engine, InFlight* operation, const py::object& stream) {
    return tritondt::end(engine, operation, stream.ptr());
  }

  static void run(const Way& way, const Kept& kept, const Given& given, std::uintptr_t stream) {
    const std::vector<nccl::Call> calls = kept.calls->calls(given.addresses);
    const py::gil_scoped_release released;
    way.native->issue_all(calls, stream_at(stream), nullptr);
  }

  // The exception that is being handled, as Python would see it raised.
  static py::object as_python_error() {
    const std::exception_ptr thrown = std::current_exception();
    try {
      py::cpp_function([thrown] { std::rethrow_exception(thrown); })();
    } catch (const py::error_already_set& error) {
      return error.value();
    }
    throw std::logic_error("an exception that was raised again was not");
  }

  static constexpr std::uint8_t kComplex = 5;

  const py::tuple tensor_classes_;
  const py::object profiler_;
  const dlpack::ExchangeApi* api_ = nullptr;
  bool is_open_ = false;
  pid_t process_ = -1;
  dlpack::DLDevice device_ = {};
  WayPtr way_;  // a call that is under way keeps its own
  std::unordered_map<Key, Kept, HashOfKey> kept_;
};

namespace {

PyTypeObject* calls_type = nullptr;

// Null where `object` is no GroupCalls.
GroupCalls* calls_of(PyObject* object) {
  if (Py_TYPE(object) != calls_type) return nullptr;
  return static_cast<GroupCalls*>(
      reinterpret_cast<py::detail::instance*>(object)->get_value_and_holder().value_ptr());
}

constexpr const char* kSignature = "tritondt.signature";

// A collective by C; nothing where Python has to look at it.
py::object attempt(const Signature& signature, PyObject* general, PyObject* const* values,
                   Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(signature.num_arguments) + 1) return py::object();
  const py::object held = attribute(values[0], names->calls);
  GroupCalls* calls = calls_of(held.ptr());
  if (calls == nullptr || !calls->takes_calls()) return py::object();
  PyObject* const* arguments = values + 1;
  Given given;
  if (!calls->read(signature, arguments, &given)) return py::object();
  if (const Kept* kept = calls->find(given.key); kept != nullptr) {
    if (kept->calls == nullptr) return py::object();
    return calls->issue(*kept, given, arguments[signature.num_arguments - 1]);
  }
  PyObject* found = PyObject_Vectorcall(general, values, static_cast<std::size_t>(count), nullptr);
  if (found == nullptr) throw py::error_already_set();
  const auto work = py::reinterpret_steal<py::object>(found);
  calls->keep(signature, arguments, given);
  return work;
}

// What was thrown becomes Python's error.
template <typename Function>
PyObject* raising(const Function& function) {
  try {
    return function();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* attempt_collective(PlainMethod* self, PyObject* const* values, Py_ssize_t count) {
  return raising([self, values, count] {
    const auto* signature =
        static_cast<Signature*>(PyCapsule_GetPointer(self->details, kSignature));
    return attempt(*signature, self->general, values, count).release().ptr();
  });
}

PyObject* attempt_wait(PlainMethod* /*self*/, PyObject* const* values, Py_ssize_t count) {
  if (count != 1 || num_recordings != 0) return nullptr;
  return raising([values]() -> PyObject* {
    const py::object held = attribute(values[0], names->in_flight);
    InFlight* operation = as_in_flight(held.ptr());
    if (operation == nullptr || operation->waits_in_stream == 0) return nullptr;
    const auto engine = py::reinterpret_borrow<py::object>(operation->engine);
    if (!engine || operation->error != nullptr) return nullptr;
    if (!wait_for(reinterpret_cast<StreamEngine*>(engine.ptr()), operation)) {
      throw py::error_already_set();
    }
    return operation->error != nullptr ? nullptr : Py_NewRef(Py_True);  // it may fail meanwhile
  });
}

py::object method_of(PyObject* general, PyObject* details, PlainMethod::Try attempt) {
  PyObject* made = make_plain_method(general, details, attempt);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::object collective_method(const py::function& general, py::object key_of,
                             const std::vector<int>& order, int num_arguments, bool has_op,
                             bool has_root) {
  static int num_made = 0;
  for (const int place : order) {
    if (place < 0 || place >= num_arguments - 1) {
      throw py::value_error("the place of an argument is none before the options");
    }
  }
  auto signature = std::make_unique<Signature>(Signature{std::move(key_of), order,
                                                         static_cast<std::size_t>(num_arguments),
                                                         has_op, has_root, num_made++});
  const py::capsule details(signature.release(), kSignature, [](PyObject* capsule) {
    delete static_cast<Signature*>(PyCapsule_GetPointer(capsule, kSignature));
  });
  return method_of(general.ptr(), details.ptr(), attempt_collective);
}

void collect_by(PyHeapTypeObject* heap_type) {
  PyTypeObject* type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const auto* calls = calls_of(self);
    return calls == nullptr ? 0 : calls->traverse(visit, arg);
  };
  type->tp_clear = [](PyObject* self) {
    if (GroupCalls* calls = calls_of(self); calls != nullptr) calls->end();
    return 0;
  };
}

}  // namespace

void bind_collective_calls(py::module_* module) {
  static const Names made;
  names = &made;
  PyDateTime_IMPORT;
  if (PyDateTimeAPI == nullptr || !make_plain_method_type()) throw py::error_already_set();
  py::class_<GroupCalls> type(*module, "GroupCalls", py::custom_type_setup(collect_by),
                              "The collectives of one rank of a group over NCCL, each one call.");
  type.def(py::init<py::tuple, py::object>(), py::arg("tensor_classes"), py::arg("profiler"))
      .def("open", &GroupCalls::open, py::arg("stream"), py::arg("engine"), py::arg("communicator"),
           py::arg("recorder"), py::arg("label"), py::arg("turn"), py::arg("work_class"),
           py::arg("token"), py::arg("find"),
           "Takes calls of tensors on the device of `token` from now on, by what `find` has.")
      .def("close", &GroupCalls::close, "Leaves all calls to Python from now on.")
      .def("end", &GroupCalls::end, "The same for good: lets go of the group.")
      .def("forget", &GroupCalls::forget, "Asks `find` anew for each operation.")
      .def_property_readonly("is_open", &GroupCalls::is_open)
      .def_readwrite("num_operations", &GroupCalls::num_operations)
      .def_readwrite("timeout_s", &GroupCalls::timeout_s);
  calls_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  module->def("collective_method", &collective_method, py::arg("general"), py::arg("key_of"),
              py::arg("order"), py::arg("num_arguments"), py::arg("has_op"), py::arg("has_root"),
              "A method of a process group that goes by its `_calls` where these know the call.");
  module->def(
      "wait_method",
      [](const py::function& general) { return method_of(general.ptr(), nullptr, attempt_wait); },
      py::arg("general"), "A Work's `wait`, in one call for an operation that is in a stream.");
  module->def(
      "record_calls", [](bool is_on) { num_recordings += is_on ? 1 : -1; }, py::arg("is_on"),
      "Leaves collectives and their waits to Python's methods, which a recording replaces.");
}

}  // namespace tritondt
