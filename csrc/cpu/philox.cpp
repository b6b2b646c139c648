#include "cpu/philox.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/parallel.h"

namespace tritondt {
namespace {

constexpr std::uint64_t kLow = 0xFFFFFFFF;
constexpr int kRounds = 10;

std::uint64_t random_word(std::uint64_t counter, std::uint64_t key, int lane) {
  std::uint64_t first = counter & kLow, second = counter >> 32, third = 0, fourth = 0;
  std::uint64_t low_key = key & kLow, high_key = key >> 32;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t left = first * 0xD2511F53, right = third * 0xCD9E8D57;
    first = (right >> 32) ^ second ^ low_key;
    second = right & kLow;
    third = (left >> 32) ^ fourth ^ high_key;
    fourth = left & kLow;
    low_key = (low_key + 0x9E3779B9) & kLow;
    high_key = (high_key + 0xBB67AE85) & kLow;
  }
  return lane == 0 ? first | second << 32 : third | fourth << 32;
}

std::int64_t total(const std::vector<Interval>& intervals) {
  std::int64_t length = 0;
  for (const auto& [start, stop] : intervals) length += stop - start;
  return length;
}

// A part of a tensor as rows along its last dim.
class Part {
 public:
  Part(const std::vector<std::vector<Interval>>& region, const std::vector<std::int64_t>& shape)
      : last_({{0, 1}}) {
    if (region.size() != shape.size()) {
      throw std::invalid_argument("region has " + std::to_string(region.size()) +
                                  " dims, shape has " + std::to_string(shape.size()));
    }
    std::int64_t stride = 1;
    for (std::size_t dim = shape.size(); dim-- > 0; stride *= shape[dim]) {
      check(region[dim], shape[dim], dim);
      if (dim + 1 == shape.size()) {
        last_ = region[dim];
        continue;
      }
      std::vector<std::int64_t> offsets;
      for (const auto& [start, stop] : region[dim]) {
        for (std::int64_t index = start; index < stop; ++index) offsets.push_back(index * stride);
      }
      num_rows_ *= static_cast<std::int64_t>(offsets.size());
      offsets_.push_back(std::move(offsets));
    }
    row_length_ = total(last_);
  }

  std::int64_t num_elements() const { return num_rows_ * row_length_; }

  // Writes the words of the elements from `begin` up to `end`, counted within the part.
  void write(std::int64_t begin, std::int64_t end, std::uint64_t key, int lane,
             std::uint64_t* words) const {
    while (begin < end) {
      const std::int64_t row = begin / row_length_, row_start = row * row_length_;
      const std::int64_t row_end = std::min(end, row_start + row_length_);
      const std::int64_t base = offset_of(row);
      std::int64_t position = row_start;
      for (const auto& [start, stop] : last_) {
        const std::int64_t next = position + stop - start;
        const std::int64_t first = std::max(begin, position), after = std::min(row_end, next);
        const std::int64_t shift = base + start - position;
        for (std::int64_t place = first; place < after; ++place) {
          words[place] = random_word(static_cast<std::uint64_t>(place + shift), key, lane);
        }
        position = next;
      }
      begin = row_end;
    }
  }

 private:
  static void check(const std::vector<Interval>& intervals, std::int64_t length, std::size_t dim) {
    for (const auto& [start, stop] : intervals) {
      if (start < 0 || stop < start || stop > length) {
        throw std::invalid_argument("dim " + std::to_string(dim) + " of length " +
                                    std::to_string(length) + " has no indices from " +
                                    std::to_string(start) + " up to " + std::to_string(stop));
      }
    }
  }

  // Where a row begins in the whole tensor.
  std::int64_t offset_of(std::int64_t row) const {
    std::int64_t offset = 0;
    for (const std::vector<std::int64_t>& offsets : offsets_) {  // the last but one dim first
      const auto length = static_cast<std::int64_t>(offsets.size());
      offset += offsets[static_cast<std::size_t>(row % length)];
      row /= length;
    }
    return offset;
  }

  std::vector<std::vector<std::int64_t>> offsets_;
  std::vector<Interval> last_;
  std::int64_t num_rows_ = 1;
  std::int64_t row_length_ = 1;
};

}  // namespace

void write_random_words(const std::vector<std::vector<Interval>>& region,
                        const std::vector<std::int64_t>& shape, std::uint64_t key, int lane,
                        std::uint64_t* words, int num_threads) {
  if (lane < 0 || lane > 1) {
    throw std::invalid_argument("lane is " + std::to_string(lane) + "; it must be 0 or 1");
  }
  const Part part(region, shape);
  struct Piece {
    Slices slices;
  };
  constexpr std::int64_t kWord = sizeof(std::uint64_t);
  const std::int64_t num_words = part.num_elements();
  const std::vector<Piece> pieces = {{{num_words * kWord, num_words, kWord}}};
  run_in_threads(pieces, num_words * kWord, num_threads,
                 [&](const Piece&, std::int64_t first, std::int64_t end) {
                   part.write(first, end, key, lane, words);
                 });
}

}  // namespace tritondt
