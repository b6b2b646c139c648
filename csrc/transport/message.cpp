#include "transport/message.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace tritondt {

MessageSlices::MessageSlices(std::vector<MessageSlice> slices) : slices_(std::move(slices)) {}

std::vector<Message> MessageSlices::messages(const std::vector<std::uintptr_t>& addresses,
                                             std::uintptr_t buffer) const {
  std::vector<Message> messages;
  messages.reserve(slices_.size());
  for (const MessageSlice& slice : slices_) {
    if (slice.tensor && *slice.tensor >= addresses.size()) {
      throw std::out_of_range("a slice is of tensor " + std::to_string(*slice.tensor) +
                              ", but the number of addresses is " +
                              std::to_string(addresses.size()));
    }
    const std::uintptr_t base = slice.tensor ? addresses[*slice.tensor] : buffer;
    messages.push_back({slice.peer, base + slice.start, slice.num_bytes});
  }
  return messages;
}

}  // namespace tritondt
