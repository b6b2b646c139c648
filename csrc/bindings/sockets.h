#pragma once

#include <pybind11/pybind11.h>

namespace tritondt {

void bind_socket_group(pybind11::module_* module);

// After bind_socket_group and bind_flight_recorder.
void bind_watchdog(pybind11::module_* module);

}  // namespace tritondt
