#pragma once

#include <cstdint>

namespace tritondt {

// Asks the kernel to back [address, address + num_bytes) with huge pages as it is first touched. A
// hint: where the kernel does not take it, nothing changes.
void advise_huge_pages(std::uintptr_t address, std::int64_t num_bytes);

}  // namespace tritondt
