#pragma once

#include <memory>

#include "nccl/api.h"

namespace tritondt::nccl {

// The C functions by which others (torch.cuda.memory.CUDAPluggableAllocator) allocate memory that
// NCCL can register: of (size, device, stream), and (address, size, device, stream). The device is
// the current one. The first throws what fails; the second says it on stderr.
constexpr const char* kPoolAllocate = "tritondt_nccl_allocate";
constexpr const char* kPoolFree = "tritondt_nccl_free";

// Lets a library serve them, from now on: there is one for the whole process. Throws Unsupported
// before 2.19, and Error where another library serves already.
void serve_pool(const std::shared_ptr<const Api>& api);

}  // namespace tritondt::nccl
