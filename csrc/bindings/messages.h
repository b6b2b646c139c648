#pragma once

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/message.h"

namespace tritondt {

// A message as Python writes it: (peer, address, bytes).
using MessageFields = std::tuple<std::int64_t, std::uintptr_t, std::int64_t>;

inline std::vector<Message> make_messages(const std::vector<MessageFields>& fields) {
  std::vector<Message> messages;
  messages.reserve(fields.size());
  for (const auto& [peer, address, num_bytes] : fields) {
    messages.push_back({peer, address, num_bytes});
  }
  return messages;
}

// A slice as Python writes it: (peer, tensor or None, start, bytes).
using SliceFields =
    std::tuple<std::int64_t, std::optional<std::size_t>, std::uintptr_t, std::int64_t>;

inline MessageSlices make_slices(const std::vector<SliceFields>& fields) {
  std::vector<MessageSlice> slices;
  slices.reserve(fields.size());
  for (const auto& [peer, tensor, start, num_bytes] : fields) {
    slices.push_back({peer, tensor, start, num_bytes});
  }
  return MessageSlices(std::move(slices));
}

}  // namespace tritondt
