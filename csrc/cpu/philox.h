#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tritondt {

// [start, stop) of one dim of a tensor.
using Interval = std::pair<std::int64_t, std::int64_t>;

// 64 random bits for each element of a part of a tensor of `shape`, by Philox4x32-10 (Salmon et
// al., "Parallel random numbers: as easy as 1, 2, 3"): a function of `key` and of the element's
// place in the whole tensor, row by row, and so the same whoever computes it. `region` holds what
// the part has of each dim; `words` has room for the part, row by row. A call of the generator
// gives 128 bits: `lane`, 0 or 1, says which half. Throws std::invalid_argument.
void write_random_words(const std::vector<std::vector<Interval>>& region,
                        const std::vector<std::int64_t>& shape, std::uint64_t key, int lane,
                        std::uint64_t* words, int num_threads);

}  // namespace tritondt
