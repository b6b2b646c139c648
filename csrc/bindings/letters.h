#pragma once

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/letter.h"

namespace tritondt {

// A letter as Python writes it: (peer, address, bytes).
using LetterFields = std::tuple<std::int64_t, std::uintptr_t, std::int64_t>;

inline std::vector<Letter> make_letters(const std::vector<LetterFields>& fields) {
  std::vector<Letter> letters;
  letters.reserve(fields.size());
  for (const auto& [peer, address, num_bytes] : fields) {
    letters.push_back({peer, address, num_bytes});
  }
  return letters;
}

// A slice as Python writes it: (peer, tensor or None, start, bytes).
using SliceFields =
    std::tuple<std::int64_t, std::optional<std::size_t>, std::uintptr_t, std::int64_t>;

inline LetterSlices make_slices(const std::vector<SliceFields>& fields) {
  std::vector<LetterSlice> slices;
  slices.reserve(fields.size());
  for (const auto& [peer, tensor, start, num_bytes] : fields) {
    slices.push_back({peer, tensor, start, num_bytes});
  }
  return LetterSlices(std::move(slices));
}

}  // namespace tritondt
