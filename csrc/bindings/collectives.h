#pragma once

#include <pybind11/pybind11.h>

namespace tritondt {

// Collectives as programs of a ArenaGroup.
void bind_collectives(pybind11::module_* module);

}  // namespace tritondt
