#pragma once

namespace tritondt {

// Lets every std::system_error that leaves a function of this module arrive in Python as OSError
// with its errno, and so as PermissionError, FileNotFoundError and the like.
void translate_system_errors();

}  // namespace tritondt
