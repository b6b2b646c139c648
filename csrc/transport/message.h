#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace tritondt {

// Bytes that go to a peer, or come from it.
struct Message {
  std::int64_t peer;
  std::uintptr_t address;
  std::int64_t num_bytes;
};

// A message before it is known where tensors lie: bytes from `start` on of tensor number `tensor`,
// or of a buffer.
struct MessageSlice {
  std::int64_t peer;
  std::optional<std::size_t> tensor;
  std::uintptr_t start;
  std::int64_t num_bytes;
};

// The messages of an exchange, for all times that it runs.
class MessageSlices {
 public:
  explicit MessageSlices(std::vector<MessageSlice> slices);

  // Throws std::out_of_range where a tensor is not among those at `addresses`.
  std::vector<Message> messages(const std::vector<std::uintptr_t>& addresses,
                                std::uintptr_t buffer) const;

 private:
  std::vector<MessageSlice> slices_;
};

}  // namespace tritondt
