#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

using Integers = std::vector<std::int64_t>;

inline std::mt19937_64& generator() {
  static std::mt19937_64 made(20261121);
  return made;
}

inline std::int64_t random(std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(generator());
}

// A box's place in a tensor of its own: dims in any order, with gaps.
struct Place {
  Integers strides;
  std::int64_t offset;
  std::int64_t num_elements;
};

inline Place random_place(const Integers& lengths) {
  std::vector<std::size_t> order(lengths.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (random(0, 1) == 0) std::shuffle(order.begin(), order.end(), generator());
  Place place = {Integers(lengths.size()), random(0, 3), 1};
  for (std::size_t i = order.size(); i-- > 0;) {
    place.strides[order[i]] = place.num_elements;
    place.num_elements *=
        std::max<std::int64_t>(lengths[order[i]], 1) + (random(0, 2) == 0 ? random(1, 3) : 0);
  }
  place.num_elements += place.offset;
  return place;
}

// Calls visit(indices) for every element of the box.
template <typename Visit>
void for_each(const Integers& lengths, const Visit& visit) {
  Integers indices(lengths.size(), 0);
  if (std::count(lengths.begin(), lengths.end(), 0) != 0) return;
  while (true) {
    visit(indices);
    std::size_t dim = lengths.size();
    while (dim > 0 && ++indices[dim - 1] == lengths[dim - 1]) indices[--dim] = 0;
    if (dim == 0) return;
  }
}

inline std::int64_t at(const Place& place, const Integers& indices) {
  std::int64_t found = place.offset;
  for (std::size_t i = 0; i < indices.size(); ++i) found += indices[i] * place.strides[i];
  return found;
}

inline Integers random_lengths(std::int64_t longest) {
  Integers lengths(static_cast<std::size_t>(random(0, 4)));
  for (std::int64_t& length : lengths) length = random(0, 20) == 0 ? 0 : random(1, longest);
  return lengths;
}

inline std::uintptr_t address(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}
