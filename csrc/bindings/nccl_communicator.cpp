#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/nccl.h"
#include "nccl/names.h"

namespace py = pybind11;

namespace tritondt {
namespace {

using nccl::Communicator;
using Released = py::call_guard<py::gil_scoped_release>;
using OptionsArgument = std::optional<nccl::Options>;

// As Python writes them: (peer, address, bytes, offset), (peer, number of signals).
using PutFields = std::tuple<std::int64_t, std::uintptr_t, std::int64_t, std::size_t>;
using ExpectedFields = std::pair<std::int64_t, int>;

const nccl::Options* pointer_to(const OptionsArgument& options) {
  return options ? &*options : nullptr;
}

CommunicatorPtr split(Communicator& self, std::optional<int> color, int key,
                      const OptionsArgument& options) {
  if (color && *color < 0) {
    throw std::invalid_argument("the color " + std::to_string(*color) +
                                " was given; it must be 0 or more, or None for no communicator");
  }
  nccl::Communicator::Ptr made =
      self.split(color.value_or(nccl::kNoColor), key, pointer_to(options));
  return made == nullptr ? nullptr : hold(std::move(made));
}

CommunicatorPtr shrink(Communicator& self, std::vector<int> excluded,
                       const OptionsArgument& options, bool abort) {
  return hold(self.shrink(std::move(excluded), pointer_to(options), abort));
}

CommunicatorPtr grow(Communicator& self, int num_ranks, const std::optional<py::bytes>& unique_id,
                     const OptionsArgument& options) {
  std::optional<nccl::ncclUniqueId> id;
  if (unique_id) id = id_of(*unique_id);
  const py::gil_scoped_release released;
  return hold(self.grow(num_ranks, id ? &*id : nullptr, pointer_to(options)));
}

py::bytes grow_id(Communicator& self) {
  nccl::ncclUniqueId id;
  {
    const py::gil_scoped_release released;
    id = self.grow_id();
  }
  return bytes_of(id);
}

void bind_life(CommunicatorClass* type) {
  type->def("split", &split, py::arg("color"), py::arg("key"), py::arg("options") = py::none(),
            Released(), "Ranks of one color as a communicator, by key; None for the color None.")
      .def("shrink", &shrink, py::arg("excluded"), py::arg("options") = py::none(),
           py::arg("abort") = false, Released(),
           "All but the excluded ranks as a communicator; they do not call this.")
      .def("grow", &grow, py::arg("num_ranks"), py::arg("unique_id") = py::none(),
           py::arg("options") = py::none(), "These ranks and those that join as a communicator.")
      .def("grow_id", &grow_id, "What those that join are to be given; from one rank, once.")
      .def("poll", &Communicator::poll, Released(),
           "Whether the communicator is ready for another call; NcclError where one failed.")
      .def("wait", &Communicator::wait, py::arg("timeout_s"), Released(),
           "Polls until ready; False when the time is over.")
      .def("finalize", &Communicator::finalize, Released(),
           "Begins to end the communicator; ready again when all ranks have called it.")
      .def("destroy", &Communicator::destroy, Released(), "Frees a communicator that is ready.")
      .def("abort", &Communicator::abort, Released(),
           "Ends whatever is under way, and the communicator; from any thread, and again.")
      .def("leave", &Communicator::leave,
           "Leaves the communicator to the end of the process; it takes no more calls.")
      .def("revoke", &Communicator::revoke, Released(),
           "Ends whatever is under way, and takes no more calls but split, shrink and destroy.")
      .def_property_readonly("is_blocking", &Communicator::is_blocking)
      .def_property_readonly(
          "rank",
          py::cpp_function([](Communicator& self) { return self.place().rank; }, Released()))
      .def_property_readonly(
          "num_ranks",
          py::cpp_function([](Communicator& self) { return self.place().num_ranks; }, Released()))
      .def_property_readonly("device", py::cpp_function(&Communicator::device, Released()));
}

int pre_mul_sum(Communicator& self, const nccl::Factor& factor, const std::string& dtype) {
  const nccl::ncclDataType_t type = nccl::dtype_of(dtype, self.library());
  std::uint64_t element = nccl::element_of(factor, type);
  return self.create_pre_mul_sum(&element, type, nccl::ncclScalarHostImmediate);
}

int pre_mul_sum_on_device(Communicator& self, std::uintptr_t address, const std::string& dtype) {
  return self.create_pre_mul_sum(reinterpret_cast<void*>(address),
                                 nccl::dtype_of(dtype, self.library()), nccl::ncclScalarDevice);
}

void bind_ops(CommunicatorClass* type) {
  type->def("pre_mul_sum", &pre_mul_sum, py::arg("factor"), py::arg("dtype"), Released(),
            "The number of an op: the sum of terms times `factor`.")
      .def("pre_mul_sum_on_device", &pre_mul_sum_on_device, py::arg("address"), py::arg("dtype"),
           Released(), "The same, with a factor that is read on the device when the op is used.")
      .def(
          "destroy_op",
          [](Communicator& self, std::int64_t op) { self.destroy_op(nccl::op_of(op)); },
          py::arg("op"), Released(), "Ends an op, when the last call with it has returned.");
}

void bind_memory(CommunicatorClass* type) {
  type->def("register_buffer", &Communicator::register_buffer, py::arg("address"),
            py::arg("num_bytes"), Released(),
            "The handle of memory that NCCL may then use where it lies.")
      .def("deregister_buffer", &Communicator::deregister_buffer, py::arg("handle"), Released(),
           "Ends what `register_buffer` began.")
      .def("register_window", &Communicator::register_window, py::arg("address"),
           py::arg("num_bytes"), py::arg("flags") = nccl::kWindowSymmetric,
           py::arg("timeout_s") = 300.0, Released(),
           "A window of all ranks, or NcclUnsupportedError; symmetric memory unless flags is 0.")
      .def("deregister_window", &Communicator::deregister_window, py::arg("window"), Released(),
           "Ends what `register_window` began.")
      .def("peer_pointers", &Communicator::peer_pointers, py::arg("window"), py::arg("offset"),
           Released(), "Addresses here of a byte of every rank's part of a window; 0 for none.")
      .def("multimem_pointer", &Communicator::multimem_pointer, py::arg("window"),
           py::arg("offset"), Released(),
           "The address of a byte of all parts at once, or NcclUnsupportedError.");
}

void put(Communicator& self, const std::vector<PutFields>& puts, std::uintptr_t window,
         std::uintptr_t stream, int signal, int context) {
  std::vector<Communicator::Put> made;
  for (const auto& [peer, address, num_bytes, offset] : puts) {
    made.push_back({{peer, address, num_bytes}, offset});
  }
  self.put(made, window, {signal, context}, stream_at(stream));
}

void wait_signals(Communicator& self, const std::vector<ExpectedFields>& expected,
                  std::uintptr_t stream, int signal, int context) {
  std::vector<Communicator::Expected> made;
  for (const auto& [peer, num_signals] : expected) made.push_back({peer, num_signals});
  self.wait_signals(made, {signal, context}, stream_at(stream));
}

void bind_one_sided(CommunicatorClass* type) {
  type->def("put", &put, py::arg("puts"), py::arg("window"), py::arg("stream"),
            py::arg("signal") = 0, py::arg("context") = 0, Released(),
            "Bytes (peer, address, bytes, offset) into the peers' windows, and a signal to each.")
      .def("wait_signals", &wait_signals, py::arg("expected"), py::arg("stream"),
           py::arg("signal") = 0, py::arg("context") = 0, Released(),
           "The stream waits for (peer, number of signals) of each.");
}

}  // namespace

void bind_nccl_communicator(py::module_* module) {
  CommunicatorClass type(*module, "NcclCommunicator", "One rank of a communicator of NCCL.");
  bind_life(&type);
  bind_nccl_calls(module, &type);
  bind_ops(&type);
  bind_memory(&type);
  bind_one_sided(&type);
}

}  // namespace tritondt
