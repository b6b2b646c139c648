#pragma once

#include <pybind11/pybind11.h>

namespace tritondt {

// Adds `stay_at_exit`, for threads of Python that the end of the process may find within C++.
void bind_daemon_threads(pybind11::module_* module);

}  // namespace tritondt
