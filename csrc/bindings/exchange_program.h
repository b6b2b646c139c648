#pragma once

#include <pybind11/pybind11.h>

namespace tritondt {

// Adds ExchangeProgram; after StreamEngine, MessageSlices and NcclCommunicator.
void bind_exchange_program(pybind11::module_* module);

}  // namespace tritondt
