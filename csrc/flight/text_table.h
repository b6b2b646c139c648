#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace tritondt {

// Texts by small numbers, each kept once and never dropped. Reading takes no lock, so a process
// that is forked while one thread reads can go on adding.
class TextTable {
 public:
  TextTable() = default;
  ~TextTable();
  TextTable(const TextTable&) = delete;
  TextTable& operator=(const TextTable&) = delete;

  // The number of `text`: 0 for the first one, equal for equal texts.
  std::int32_t number(std::string_view text);

  // The text of a number that `number` gave; null for any other.
  const std::string* text(std::int32_t number) const;

 private:
  // Block k holds kFirstBlock << k texts and never moves.
  static constexpr std::size_t kFirstBlock = 64;
  static constexpr std::size_t kNumBlocks = 25;
  static std::size_t block_of(std::size_t number);
  static std::size_t begin_of(std::size_t block) {
    return kFirstBlock * ((std::size_t{1} << block) - 1);
  }

  std::array<std::atomic<std::string*>, kNumBlocks> blocks_ = {};
  std::atomic<std::int32_t> num_texts_{0};
  std::mutex adding_;
  std::unordered_map<std::string_view, std::int32_t> numbers_;
};

}  // namespace tritondt
