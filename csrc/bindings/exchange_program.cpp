#include "bindings/exchange_program.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/dlpack.h"
#include "bindings/flight.h"
#include "bindings/nccl.h"
#include "bindings/stream_engine.h"
#include "nccl/calls.h"
#include "transport/message.h"

namespace py = pybind11;

namespace tritondt {
namespace {

using Addresses = std::vector<std::uintptr_t>;

// A table's `run`, and what it is given: a letter for each operand, see `StreamProgram::operands`.
using LaunchFields = std::tuple<py::object, std::string, std::string>;

// A tensor as the program was compiled for it: everything but where it lies.
class Fields {
 public:
  explicit Fields(const dlpack::DLTensor& tensor)
      : device_(tensor.device),
        dtype_(tensor.dtype),
        shape_(tensor.shape, tensor.shape + tensor.num_dims),
        strides_(tensor.strides, tensor.strides + tensor.num_dims) {
    for (const std::int64_t length : shape_) is_empty_ |= length == 0;
  }

  bool is_empty() const { return is_empty_; }

  bool are_of(const dlpack::DLTensor& tensor) const {
    const std::size_t num_bytes = shape_.size() * sizeof(std::int64_t);
    return tensor.num_dims == static_cast<std::int32_t>(shape_.size()) &&
           std::memcmp(&tensor.device, &device_, sizeof device_) == 0 &&
           std::memcmp(&tensor.dtype, &dtype_, sizeof dtype_) == 0 &&
           std::memcmp(tensor.shape, shape_.data(), num_bytes) == 0 &&
           std::memcmp(tensor.strides, strides_.data(), num_bytes) == 0;
  }

 private:
  dlpack::DLDevice device_;
  dlpack::DLDataType dtype_;
  std::vector<std::int64_t> shape_, strides_;
  bool is_empty_ = false;
};

std::uintptr_t address_of(const dlpack::DLTensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
}

// One rank's side of an exchange over NCCL, for all times that it runs on tensors alike: found in
// order, recorded, watched, packed, sent, unpacked by one call.
class ExchangeProgram {
 public:
  ExchangeProgram(py::object engine, CommunicatorPtr native, const RecorderHandle& recorder,
                  py::tuple tensor_classes, py::object launch)
      : engine_(std::move(engine)),
        native_(std::move(native)),
        recorder_(recorder.recorder),
        tensor_classes_(std::move(tensor_classes)),
        launch_(std::move(launch)) {
    if (!is_stream_engine(engine_.ptr())) {
      throw py::type_error("a program takes a StreamEngine of tritondt._C");
    }
    const py::object tensor_class = tensor_classes_[0];
    api_ = dlpack::exchange_api_of(tensor_class.ptr());
    if (api_ == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  }

  void set_operation(py::str text, std::uint64_t fingerprint, std::int32_t communicator,
                     std::int32_t label, py::object record) {
    text_ = std::move(text);
    record_ = std::move(record);
    fingerprint_ = fingerprint;
    communicator_ = communicator;
    label_ = label;
  }

  void set_messages(const MessageSlices& sends, const MessageSlices& receives, py::object messages,
                    std::int64_t sent_bytes, std::int64_t received_bytes) {
    sends_ = std::make_unique<MessageSlices>(sends);
    receives_ = std::make_unique<MessageSlices>(receives);
    messages_ = std::move(messages);
    sent_bytes_ = sent_bytes;
    received_bytes_ = received_bytes;
  }

  void set_launches(std::vector<LaunchFields> before, std::vector<LaunchFields> after,
                    bool is_packing, bool is_keeping, std::uintptr_t packed_at) {
    before_ = std::move(before);
    after_ = std::move(after);
    is_packing_ = is_packing;
    is_keeping_ = is_keeping;
    packed_at_ = packed_at;
  }

  // Whether tensors like these can be told from others; the program is for such from now on.
  bool set_tensors(const py::sequence& sources, const py::sequence& targets,
                   std::uintptr_t alignment) {
    alignment_ = alignment;
    return api_ != nullptr && describe(sources, &source_fields_) &&
           describe(targets, &target_fields_);
  }

  // The operation in flight; None where the tensors are not those that the program is for, before
  // anything is done.
  py::object issue(const py::sequence& sources, const py::sequence& targets, std::uintptr_t memory,
                   long long sequence, long long site, double timeout_s, int num_threads) {
    if (sends_ == nullptr) throw std::logic_error("the program has no messages");
    if (is_running_) {
      throw std::runtime_error("two threads run one program at once; a communicator takes one");
    }
    operation_ = py::object();
    native_->check_usable();  // before anything is launched
    Addresses source_addresses, target_addresses;
    if (!find(sources, source_fields_, &source_addresses) ||
        !find(targets, target_fields_, &target_addresses)) {
      return py::none();
    }
    const Running running(&is_running_);
    operation_ = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(new_in_flight(text_.ptr(), fingerprint_, site, timeout_s)));
    if (!operation_) throw py::error_already_set();
    auto* operation = reinterpret_cast<InFlight*>(operation_.ptr());
    const std::int64_t entry = recorder_->begin(communicator_, sequence, label_, fingerprint_,
                                                static_cast<std::int32_t>(site));
    if (StepLog::of_process().is_on()) {
      tell_exchange(recorder_, entry, sequence, static_cast<std::int32_t>(site), record_.ptr());
    }
    begin_in_flight(operation, sequence, entry);
    operation->messages = messages_.inc_ref().ptr();
    operation->sent_bytes = sent_bytes_;
    operation->received_bytes = received_bytes_;
    auto* engine = reinterpret_cast<StreamEngine*>(engine_.ptr());
    if (!watch(engine, operation)) throw py::error_already_set();
    const Operands operands = {source_addresses, target_addresses, memory, memory + packed_at_,
                               num_threads};
    if (is_packing_) recorder_->step(entry, StepKind::kPack);
    for (const LaunchFields& each : before_) launch(each, operands);
    recorder_->step(entry, StepKind::kSend);
    send(operands, engine->target);
    for (std::size_t i = 0; i < after_.size(); ++i) {
      if (i == 0 && is_keeping_) recorder_->step(entry, StepKind::kKeep);
      if (i == (is_keeping_ ? 1 : 0)) recorder_->step(entry, StepKind::kUnpack);
      launch(after_[i], operands);
    }
    recorder_->leave(entry);
    return std::move(operation_);
  }

  // That of a call of `issue` which raised; None where nothing had been begun.
  py::object operation() const { return operation_ ? operation_ : py::none(); }

 private:
  struct Running {
    explicit Running(bool* flag) : flag_(flag) { *flag_ = true; }
    ~Running() { *flag_ = false; }
    bool* flag_;
  };

  struct Operands {
    const Addresses &source_addresses, &target_addresses;
    std::uintptr_t received, packed;
    int num_threads;
  };

  bool view(py::handle tensor, dlpack::DLTensor* out) const {
    // A subclass may be anything: what is of no known class exactly is left to Python.
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    bool is_known = false;
    for (const py::handle each : tensor_classes_) is_known |= each.ptr() == type;
    if (!is_known) return false;
    if (api_->view(tensor.ptr(), out) == 0) return true;
    PyErr_Clear();  // a tensor that DLPack has no words for
    return false;
  }

  bool describe(const py::sequence& tensors, std::vector<Fields>* fields) const {
    fields->clear();
    for (const py::handle each : tensors) {
      dlpack::DLTensor tensor = {};
      if (!view(each, &tensor)) return false;
      fields->emplace_back(tensor);
    }
    return true;
  }

  bool find(const py::sequence& tensors, const std::vector<Fields>& fields,
            Addresses* addresses) const {
    if (api_ == nullptr || tensors.size() != fields.size()) return false;
    addresses->reserve(fields.size());
    for (std::size_t i = 0; i < fields.size(); ++i) {
      dlpack::DLTensor tensor = {};
      if (!view(tensors[i], &tensor) || !fields[i].are_of(tensor)) return false;
      const std::uintptr_t address = address_of(tensor);
      // At 0 is a tensor whose storage was freed under it.
      if ((address == 0 && !fields[i].is_empty()) || address % alignment_ != 0) return false;
      addresses->push_back(address);
    }
    return true;
  }

  // 's' are the sources, 't' the targets, 'r' the memory of received messages, 'p' of packed ones.
  static py::list operands(const std::string& letters, const Operands& given) {
    py::list made;
    for (const char letter : letters) {
      if (letter == 's' || letter == 't') {
        for (const std::uintptr_t address :
             letter == 's' ? given.source_addresses : given.target_addresses) {
          made.append(address);
        }
      } else {
        made.append(letter == 'r' ? given.received : given.packed);
      }
    }
    return made;
  }

  void launch(const LaunchFields& fields, const Operands& given) const {
    const auto& [run, sources, targets] = fields;
    const py::list from = operands(sources, given), to = operands(targets, given);
    if (launch_.is_none()) {
      run(from, to, given.num_threads);
    } else {
      launch_(run, from, to, given.num_threads);
    }
  }

  void send(const Operands& given, PyObject* target) const {
    const auto stream = py::handle(target).attr("cuda_stream").cast<std::uintptr_t>();
    const py::gil_scoped_release released;
    native_->issue_all(nccl::exchange(sends_->messages(given.source_addresses, given.packed),
                                      receives_->messages(given.target_addresses, given.received)),
                       stream_at(stream), nullptr);
  }

  const py::object engine_;
  const CommunicatorPtr native_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const py::tuple tensor_classes_;
  const py::object launch_;
  const dlpack::ExchangeApi* api_ = nullptr;
  py::object text_, messages_, record_, operation_;
  std::uint64_t fingerprint_ = 0;
  std::int32_t communicator_ = -1, label_ = -1;
  std::unique_ptr<MessageSlices> sends_, receives_;
  std::int64_t sent_bytes_ = 0, received_bytes_ = 0;
  std::vector<LaunchFields> before_, after_;
  bool is_packing_ = false, is_keeping_ = false;
  std::uintptr_t packed_at_ = 0, alignment_ = 1;
  std::vector<Fields> source_fields_, target_fields_;
  bool is_running_ = false;
};

}  // namespace

void bind_exchange_program(py::module_* module) {
  py::class_<ExchangeProgram>(*module, "ExchangeProgram",
                              "One rank's side of an exchange over NCCL, on tensors alike.")
      .def(py::init<py::object, CommunicatorPtr, const RecorderHandle&, py::tuple, py::object>(),
           py::arg("engine"), py::arg("communicator"), py::arg("recorder"),
           py::arg("tensor_classes"), py::arg("launch"))
      .def("set_operation", &ExchangeProgram::set_operation, py::arg("text"),
           py::arg("fingerprint"), py::arg("communicator"), py::arg("label"), py::arg("record"),
           "How records name it: its text, the recorder's numbers, and what StepTimes hears.")
      .def("set_messages", &ExchangeProgram::set_messages, py::arg("sends"), py::arg("receives"),
           py::arg("messages"), py::arg("sent_bytes"), py::arg("received_bytes"),
           "What goes to peers and comes from them; `messages` is what the watch is told of them.")
      .def("set_launches", &ExchangeProgram::set_launches, py::arg("before"), py::arg("after"),
           py::arg("is_packing"), py::arg("is_keeping"), py::arg("packed_at"),
           "Launches (run, sources, targets) before and after the messages, operands by letter: s "
           "sources, t targets, r received, p packed bytes, which begin at `packed_at` in memory. "
           "`is_keeping` says whether the first one after them keeps what stays on the rank.")
      .def("set_tensors", &ExchangeProgram::set_tensors, py::arg("sources"), py::arg("targets"),
           py::arg("alignment"),
           "Makes it a program for tensors alike; False where torch does not tell their fields.")
      .def("issue", &ExchangeProgram::issue, py::arg("sources"), py::arg("targets"),
           py::arg("memory"), py::arg("sequence"), py::arg("site"), py::arg("timeout_s"),
           py::arg("num_threads"),
           "The operation in flight; None, before anything is done, for tensors of other fields.")
      .def_property_readonly("operation", &ExchangeProgram::operation,
                             "That of a call which raised; None where nothing had been begun.");
}

}  // namespace tritondt
