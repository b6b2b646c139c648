#pragma once

#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "letter.h"

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

}  // namespace tritondt
