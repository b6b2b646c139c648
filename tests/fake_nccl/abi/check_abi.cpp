// Compares the double's declarations with those of a real nccl.h, which is included first; it is
// compiled and never run. Functions of other versions are left out.
#include <nccl.h>
#include <nccl_device.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <type_traits>

