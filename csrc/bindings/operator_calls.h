#pragma once

#include <pybind11/pybind11.h>

namespace tritondt {

// Adds make_wrap, make_dispatch and running_operator; after PlainMethod.
void bind_operator_calls(pybind11::module_* module);

}  // namespace tritondt
