#include "flight/text_table.h"

#include <limits>
#include <stdexcept>

namespace tritondt {

TextTable::~TextTable() {
  for (std::atomic<std::string*>& block : blocks_) delete[] block.load(std::memory_order_relaxed);
}

std::size_t TextTable::block_of(std::size_t number) {
  std::size_t block = 0;
  while (begin_of(block + 1) <= number) ++block;
  return block;
}

std::int32_t TextTable::number(std::string_view text) {
  const std::lock_guard<std::mutex> lock(adding_);
  const auto found = numbers_.find(text);
  if (found != numbers_.end()) return found->second;
  const std::int32_t number = num_texts_.load(std::memory_order_relaxed);
  if (number == std::numeric_limits<std::int32_t>::max()) {
    throw std::length_error("a text table holds at most 2^31 - 1 texts");
  }
  const std::size_t block = block_of(static_cast<std::size_t>(number));
  std::string* texts = blocks_[block].load(std::memory_order_relaxed);
  if (texts == nullptr) {
    texts = new std::string[kFirstBlock << block];
    blocks_[block].store(texts, std::memory_order_release);
  }
  std::string& place = texts[static_cast<std::size_t>(number) - begin_of(block)];
  place.assign(text);
  numbers_.emplace(place, number);
  num_texts_.store(number + 1, std::memory_order_release);
  return number;
}

const std::string* TextTable::text(std::int32_t number) const {
  if (number < 0 || number >= num_texts_.load(std::memory_order_acquire)) return nullptr;
  const std::size_t block = block_of(static_cast<std::size_t>(number));
  return &blocks_[block].load(
      std::memory_order_acquire)[static_cast<std::size_t>(number) - begin_of(block)];
}

}  // namespace tritondt
