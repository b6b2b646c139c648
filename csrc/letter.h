#pragma once

#include <cstdint>

namespace tritondt {

// Bytes that go to a peer, or come from it.
struct Letter {
  std::int64_t peer;
  std::uintptr_t address;
  std::int64_t num_bytes;
};

}  // namespace tritondt
