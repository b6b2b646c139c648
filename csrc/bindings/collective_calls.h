#pragma once

#include <pybind11/pybind11.h>

namespace tritondt {

// Adds GroupCalls and the methods that go by it; after StreamEngine and NcclCommunicator.
void bind_collective_calls(pybind11::module_* module);

}  // namespace tritondt
