#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arenas.h"
#include "bindings/call_key.h"
#include "bindings/collective_calls.h"
#include "bindings/collectives.h"
#include "bindings/daemon_threads.h"
#include "bindings/exchange_program.h"
#include "bindings/flight.h"
#include "bindings/nccl.h"
#include "bindings/operator_calls.h"
#include "bindings/sockets.h"
#include "bindings/stream_engine.h"
#include "bindings/system_errors.h"
#include "boxes/strided_cast.h"
#include "boxes/strided_copy.h"
#include "boxes/strided_reduce.h"
#include "cpu/huge_pages.h"
#include "cpu/instructions.h"
#include "cpu/philox.h"
#include "cpu/team.h"

namespace py = pybind11;

namespace tritondt {
namespace {

// Below this, the work takes a few microseconds, and giving up the GIL and taking it again costs
// more than other threads gain.
constexpr std::int64_t kReleaseGilBytes = 64 * 1024;

using Integers = std::vector<std::int64_t>;

// The named tuples of tritondt.kernels.boxes, field by field.
using CopyBoxFields = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                                 std::int64_t, Integers, Integers, Integers>;
using CastBoxFields = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, Integers,
                                 Integers, Integers>;
using SlotFields = std::tuple<std::int64_t, std::int64_t, Integers>;
using ReduceBoxFields =
    std::tuple<std::int64_t, std::int64_t, Integers, Integers, std::vector<SlotFields>>;

CopyTable make_copy_table(const std::vector<CopyBoxFields>& boxes,
                          std::optional<bool> is_past_cache) {
  std::vector<CopyBox> converted;
  converted.reserve(boxes.size());
  for (const auto& [source, target, source_offset, target_offset, itemsize, lengths, source_strides,
                    target_strides] : boxes) {
    converted.push_back({source, target, source_offset, target_offset, itemsize, lengths,
                         source_strides, target_strides});
  }
  return CopyTable(converted, is_past_cache);
}

template <typename Table>
Table make_cast_table(const std::vector<CastBoxFields>& boxes, const std::string& source_dtype,
                      const std::string& target_dtype) {
  std::vector<CastBox> converted;
  converted.reserve(boxes.size());
  for (const auto& [source, target, source_offset, target_offset, lengths, source_strides,
                    target_strides] : boxes) {
    converted.push_back(
        {source, target, source_offset, target_offset, lengths, source_strides, target_strides});
  }
  return Table(converted, source_dtype, target_dtype);
}

ReduceTable make_reduce_table(const std::vector<ReduceBoxFields>& boxes, const std::string& op,
                              const std::string& dtype, std::int64_t divisor) {
  std::vector<ReduceBox> converted;
  converted.reserve(boxes.size());
  for (const auto& [target, offset, lengths, strides, slots] : boxes) {
    ReduceBox box = {target, offset, lengths, strides, {}};
    for (const auto& [source, slot_offset, slot_strides] : slots) {
      box.slots.push_back({source, slot_offset, slot_strides});
    }
    converted.push_back(std::move(box));
  }
  return ReduceTable(converted, op, dtype, divisor);
}

// By hand: pybind11's conversion of a list to a vector takes 0.1 us more, a tenth of a small call.
Pointers read_pointers(const py::list& list) {
  Pointers pointers;
  pointers.reserve(list.size());
  for (const py::handle item : list) {
    const std::size_t pointer = PyLong_AsSize_t(item.ptr());
    if (pointer == static_cast<std::size_t>(-1) && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    pointers.push_back(pointer);
  }
  return pointers;
}

// `scales` is there for the tables that take them.
template <typename Table, typename... Scales>
void run_table(const Table& table, const py::list& source_ptrs, const py::list& target_ptrs,
               Scales... scales, int num_threads) {
  const Pointers sources = read_pointers(source_ptrs);
  const Pointers targets = read_pointers(target_ptrs);
  if (table.num_bytes() < kReleaseGilBytes) {
    table.run(sources, targets, scales..., num_threads);
    return;
  }
  const py::gil_scoped_release released;
  table.run(sources, targets, scales..., num_threads);
}

template <typename Table>
void bind_sizes(py::class_<Table>* table) {
  table->def_property_readonly("num_bytes", &Table::num_bytes)
      .def_property_readonly("num_boxes", &Table::num_boxes)
      .def_property_readonly("num_dims", &Table::num_dims);
}

template <typename Table>
void bind_run(py::class_<Table>* table) {
  table->def("run", &run_table<Table>, py::arg("source_ptrs"), py::arg("target_ptrs"),
             py::arg("num_threads"),
             "Runs every box on the tensors whose first elements lie at the given addresses.");
  bind_sizes(table);
}

template <typename Table>
void bind_scaled_table(py::module_* module, const char* name, const char* doc) {
  py::class_<Table> table(*module, name, doc);
  table.def(py::init(&make_cast_table<Table>), py::arg("boxes"), py::arg("source_dtype"),
            py::arg("target_dtype"));
  table.def("run", &run_table<Table, std::uintptr_t>, py::arg("source_ptrs"),
            py::arg("target_ptrs"), py::arg("scales_ptr"), py::arg("num_threads"),
            "As CopyTable.run, with the address of one float32 per box.");
  bind_sizes(&table);
}

void bind_cast_tables(py::module_* module) {
  py::class_<CastTable> table(*module, "CastTable",
                              "Boxes to cast on the CPU, prepared once and run many times.");
  table.def(py::init(&make_cast_table<CastTable>), py::arg("boxes"), py::arg("source_dtype"),
            py::arg("target_dtype"));
  bind_run(&table);
  bind_scaled_table<QuantizeTable>(
      module, "QuantizeTable",
      "Boxes to cast to 8 bits on the CPU, each with a scale that is written.");
  bind_scaled_table<DequantizeTable>(
      module, "DequantizeTable",
      "Boxes to cast from 8 bits on the CPU, each with a scale that is read.");
}

void bind_copy_table(py::module_* module) {
  py::class_<CopyTable> table(*module, "CopyTable",
                              "Boxes to copy on the CPU, prepared once and run many times.");
  table.def(py::init(&make_copy_table), py::arg("boxes"), py::arg("is_past_cache") = py::none());
  bind_run(&table);
}

void bind_reduce_table(py::module_* module) {
  py::class_<ReduceTable> table(*module, "ReduceTable",
                                "Boxes to reduce on the CPU, prepared once and run many times.");
  table.def(py::init(&make_reduce_table), py::arg("boxes"), py::arg("op"), py::arg("dtype"),
            py::arg("divisor"));
  bind_run(&table);
}

// Objects that `cls.__new__(cls)` makes have no C++ object: pybind11 gives methods memory that
// nobody has initialised in its place, by this function where a class has one.
void* refuse_uninitialised(std::size_t /*num_bytes*/) {
  throw py::type_error("__init__ was not called on an object of tritondt._C; make it by its class");
}

void refuse_uninitialised_objects(const py::module_& module) {
  for (const auto& [name, value] : py::reinterpret_borrow<py::dict>(module.attr("__dict__"))) {
    if (PyType_Check(value.ptr()) == 0) continue;
    auto* const type = reinterpret_cast<PyTypeObject*>(value.ptr());
    const std::vector<py::detail::type_info*>& known = py::detail::all_type_info(type);
    for (py::detail::type_info* const info : known) info->operator_new = refuse_uninitialised;
  }
}

void write_words_at(const std::vector<std::vector<Interval>>& region, const Integers& shape,
                    std::uint64_t key, int lane, std::uintptr_t address, int num_threads) {
  const py::gil_scoped_release released;
  write_random_words(region, shape, key, lane, reinterpret_cast<std::uint64_t*>(address),
                     num_threads);
}

}  // namespace
}  // namespace tritondt

PYBIND11_MODULE(_C, module) {
  module.doc() =
      "Data movement on the CPU and by NCCL, by raw address; and keys of operator calls.";
  tritondt::translate_system_errors();
  tritondt::bind_copy_table(&module);
  tritondt::bind_cast_tables(&module);
  tritondt::bind_reduce_table(&module);
  tritondt::bind_socket_group(&module);
  tritondt::bind_arena_group(&module);
  tritondt::bind_collectives(&module);
  tritondt::bind_flight_recorder(&module);
  tritondt::bind_watchdog(&module);
  tritondt::bind_stream_engine(&module);
  tritondt::bind_nccl(&module);
  tritondt::bind_exchange_program(&module);
  tritondt::bind_collective_calls(&module);
  tritondt::bind_operator_calls(&module);
  tritondt::bind_daemon_threads(&module);
  module.def(
      "limit_instructions", &tritondt::limit_instructions, py::arg("name"),
      "For tests: allows functions for baseline, avx2 or avx512 at most, before the first table.");
  module.def(
      "team_origin",
      [] { return tritondt::team_origin() == tritondt::TeamOrigin::kTorch ? "torch" : "own"; },
      "Whose threads tables run on: 'torch', that of its OpenMP, or 'own', started for each run.");
  module.def("advise_huge_pages", &tritondt::advise_huge_pages, py::arg("address"),
             py::arg("num_bytes"),
             "Asks the kernel for huge pages under memory that is not yet touched; a hint.");
  module.def(
      "write_random_words", &tritondt::write_words_at, py::arg("region"), py::arg("shape"),
      py::arg("key"), py::arg("lane"), py::arg("address"), py::arg("num_threads"),
      "64 random bits for each element of a part of a tensor, by key and place in the whole.");
  module.def(
      "make_call_splitter",
      [](const py::type& tensor_class) {
        PyObject* made =
            tritondt::make_call_splitter(reinterpret_cast<PyTypeObject*>(tensor_class.ptr()));
        if (made == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(made);
      },
      py::arg("tensor_class"),
      "split(args, static_argnum) for calls with tensors that have _spec and _local_tensor slots.");
  tritondt::refuse_uninitialised_objects(module);
}
