#include "bindings/nccl.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "nccl/pool.h"

namespace py = pybind11;

namespace tritondt {
namespace {

using ApiPtr = std::shared_ptr<nccl::Api>;

const char* name_of(nccl::Origin origin) {
  switch (origin) {
    case nccl::Origin::kExplicit:
      return "explicit";
    case nccl::Origin::kLoaded:
      return "loaded";
    case nccl::Origin::kInstalled:
      return "installed";
  }
  throw std::logic_error("an origin without a name");
}

using ErrorClass = py::gil_safe_call_once_and_store<py::object>;
PYBIND11_CONSTINIT ErrorClass error_class;
PYBIND11_CONSTINIT ErrorClass unsupported_class;

// The class has the attributes too, for whoever looks them up there.
void add_error_class(py::module_* module, ErrorClass* store, const char* name, py::handle base,
                     const char* doc) {
  store->call_once_and_store_result([&] {
    py::dict attributes;
    attributes["function"] = "";
    attributes["result"] = py::none();
    attributes["__module__"] = module->attr("__name__");
    attributes["__doc__"] = doc;
    const py::handle metaclass(reinterpret_cast<PyObject*>(&PyType_Type));
    return metaclass(name, py::make_tuple(base), attributes);
  });
  module->attr(name) = store->get_stored();
}

void raise(ErrorClass& store, const nccl::Error& error) {
  const py::object& type = store.get_stored();
  const py::object made = type(error.what());
  made.attr("function") = error.function;
  if (error.result != nccl::ncclSuccess) made.attr("result") = nccl::name_of(error.result);
  PyErr_SetObject(type.ptr(), made.ptr());
}

void bind_errors(py::module_* module) {
  add_error_class(module, &error_class, "NcclError", PyExc_RuntimeError,
                  "A call of NCCL that failed, or could not be made.");
  add_error_class(module, &unsupported_class, "NcclUnsupportedError", error_class.get_stored(),
                  "What the loaded NCCL, or the machine, does not have.");
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const nccl::Unsupported& error) {
      raise(unsupported_class, error);
    } catch (const nccl::Error& error) {
      raise(error_class, error);
    }
  });
}

std::vector<std::tuple<std::string, std::string, bool>> symbols_of(const nccl::Api& api) {
  std::vector<std::tuple<std::string, std::string, bool>> symbols;
  for (const nccl::Symbol& symbol : api.symbols()) {
    symbols.emplace_back(symbol.name, nccl::version_text(symbol.since), symbol.is_there);
  }
  return symbols;
}

bool has(const nccl::Api& api, const std::string& name) {
  for (const nccl::Symbol& symbol : api.symbols()) {
    if (name == symbol.name) return symbol.is_there;
  }
  throw py::key_error(name + " is no function of NCCL that is used here");
}

py::bytes unique_id(const nccl::Api& api) {
  nccl::ncclUniqueId id;
  {
    const py::gil_scoped_release released;
    api.call(api.ncclGetUniqueId, &id);
  }
  return bytes_of(id);
}

std::uintptr_t allocate(const nccl::Api& api, std::size_t num_bytes) {
  void* address = nullptr;
  api.call(api.ncclMemAlloc, &address, num_bytes);
  return reinterpret_cast<std::uintptr_t>(address);
}

void release(const nccl::Api& api, std::uintptr_t address) {
  api.call(api.ncclMemFree, reinterpret_cast<void*>(address));
}

CommunicatorPtr init(const ApiPtr& api, const std::vector<py::bytes>& unique_ids, int num_ranks,
                     int rank, const std::optional<nccl::Options>& options) {
  nccl::Communicator::Ids ids;
  for (const py::bytes& id : unique_ids) ids.push_back(id_of(id));
  const py::gil_scoped_release released;
  return hold(nccl::Communicator::init(api, std::move(ids), num_ranks, rank,
                                       options ? &*options : nullptr));
}

CommunicatorPtr join(const ApiPtr& api, const py::bytes& unique_id, int num_ranks, int rank,
                     const std::optional<nccl::Options>& options) {
  const nccl::ncclUniqueId id = id_of(unique_id);
  const py::gil_scoped_release released;
  return hold(nccl::Communicator::join(api, id, num_ranks, rank, options ? &*options : nullptr));
}

void bind_library(py::module_* module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<nccl::Api, ApiPtr>(*module, "NcclLibrary",
                                "NCCL as found in this process, or loaded into it.")
      .def(py::init([](const std::optional<std::string>& explicit_path,
                       const std::optional<std::string>& installed_path) {
             const py::gil_scoped_release released;
             return std::make_shared<nccl::Api>(explicit_path.value_or(""),
                                                installed_path.value_or(""));
           }),
           py::arg("explicit_path") = py::none(), py::arg("installed_path") = py::none())
      .def_property_readonly("path", [](const nccl::Api& api) { return api.library().path(); })
      .def_property_readonly(
          "version",
          [](const nccl::Api& api) { return nccl::version_text(api.library().version()); })
      .def_property_readonly("version_code",
                             [](const nccl::Api& api) { return api.library().version(); })
      .def_property_readonly("origin",
                             [](const nccl::Api& api) { return name_of(api.library().origin()); })
      .def(
          "symbols", &symbols_of,
          "Every function that is used: its name, the version that brought it, whether it is here.")
      .def("has", &has, py::arg("name"), "Whether the library has a function.")
      .def("unique_id", &unique_id, "What all ranks of a new communicator are to be given.")
      .def("allocate", &allocate, py::arg("num_bytes"), Released(),
           "The address of device memory that can be registered.")
      .def("free", &release, py::arg("address"), Released(), "Gives back what `allocate` gave.")
      .def(
          "serve_pool",
          [](const ApiPtr& api) {
            nccl::serve_pool(api);
            return std::make_pair(nccl::kPoolAllocate, nccl::kPoolFree);
          },
          "C functions in this extension that allocate and free memory, for a pool of torch.")
      .def("init", &init, py::arg("unique_ids"), py::arg("num_ranks"), py::arg("rank"),
           py::arg("options") = py::none(),
           "This rank's part of a new communicator, on the thread's current device.")
      .def("join", &join, py::arg("unique_id"), py::arg("num_ranks"), py::arg("rank"),
           py::arg("options") = py::none(),
           "The part of a rank that is added to a communicator, while its ranks call `grow`.")
      .def(
          "call_config",
          [](const nccl::Api& api, const nccl::Options& options) {
            return std::make_unique<CallConfigHandle>(api.library(), options);
          },
          py::arg("options"), "Options for single calls, to be used in any number of them.");
  py::class_<CallConfigHandle>(*module, "NcclCallConfig", "Options for single calls.");
}

}  // namespace

CommunicatorPtr hold(nccl::Communicator::Ptr communicator) {
  return CommunicatorPtr(communicator.release(), [](nccl::Communicator* dropped) {
    // A child that gets ready may drop its parent, without the GIL.
    if (PyGILState_Check() == 0) {
      delete dropped;
      return;
    }
    const py::gil_scoped_release released;
    delete dropped;
  });
}

py::bytes bytes_of(const nccl::ncclUniqueId& id) {
  return py::bytes(id.internal, nccl::kUniqueIdBytes);
}

nccl::ncclUniqueId id_of(const py::bytes& bytes) {
  const std::string_view text = bytes;
  if (text.size() != nccl::kUniqueIdBytes) {
    throw std::invalid_argument("a unique id of " + std::to_string(text.size()) +
                                " bytes was given; it must have " +
                                std::to_string(nccl::kUniqueIdBytes));
  }
  nccl::ncclUniqueId id;
  std::copy(text.begin(), text.end(), id.internal);
  return id;
}

void bind_nccl(py::module_* module) {
  bind_errors(module);
  bind_library(module);
  bind_nccl_communicator(module);
}

}  // namespace tritondt
