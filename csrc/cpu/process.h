#pragma once

#include <sys/types.h>

namespace tritondt {

// This process's number, as of getpid, which asks the kernel each time: a tenth of a microsecond,
// and more in a sandbox. Not for signal handlers, nor for what runs within a fork.
pid_t process_number();

}  // namespace tritondt
