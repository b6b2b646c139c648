#include "transport/letter.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace tritondt {

LetterSlices::LetterSlices(std::vector<LetterSlice> slices) : slices_(std::move(slices)) {}

std::vector<Letter> LetterSlices::letters(const std::vector<std::uintptr_t>& addresses,
                                          std::uintptr_t buffer) const {
  std::vector<Letter> letters;
  letters.reserve(slices_.size());
  for (const LetterSlice& slice : slices_) {
    if (slice.tensor && *slice.tensor >= addresses.size()) {
      throw std::out_of_range("a slice is of tensor " + std::to_string(*slice.tensor) +
                              ", but the number of addresses is " +
                              std::to_string(addresses.size()));
    }
    const std::uintptr_t base = slice.tensor ? addresses[*slice.tensor] : buffer;
    letters.push_back({slice.peer, base + slice.start, slice.num_bytes});
  }
  return letters;
}

}  // namespace tritondt
