#pragma once

#include <pybind11/pybind11.h>

namespace tritondt {

// Adds Arena, ArenaProgram, ArenaRound, ArenaPlan and ArenaGroup; after CopyTable, ReduceTable
// and SocketGroup.
void bind_arena_group(pybind11::module_* module);

}  // namespace tritondt
