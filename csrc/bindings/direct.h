#pragma once

#include <pybind11/pybind11.h>

namespace tritondt {

// Adds Arena, DirectProgram, DirectRound, DirectPlan and DirectGroup; after CopyTable, ReduceTable
// and SocketGroup.
void bind_direct_group(pybind11::module_* module);

}  // namespace tritondt
