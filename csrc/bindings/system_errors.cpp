#include "bindings/system_errors.h"

#include <pybind11/pybind11.h>

#include <cstring>
#include <exception>
#include <system_error>

namespace py = pybind11;

namespace tritondt {
namespace {

bool is_errno(const std::error_code& code) {
  return code.category() == std::generic_category() || code.category() == std::system_category();
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    if (!is_errno(error.code())) throw;
    // A path in the text may be in any encoding.
    const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
        error.what(), static_cast<Py_ssize_t>(std::strlen(error.what())), "replace"));
    if (!text) return;  // Python's own error is set
    // Given both, OSError makes itself the class that its errno has.
    py::set_error(PyExc_OSError, py::make_tuple(error.code().value(), text));
  }
}

}  // namespace

void translate_system_errors() { py::register_local_exception_translator(&translate); }

}  // namespace tritondt
