// Random boxes, copied and reduced, against loops that know one element at a time.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "strided_copy.h"
#include "strided_reduce.h"

namespace {

using Integers = std::vector<std::int64_t>;

std::mt19937_64& generator() {
  static std::mt19937_64 made(20261121);
  return made;
}

std::int64_t random(std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(generator());
}

// A box's place in a tensor of its own: dims in any order, with gaps.
struct Place {
  Integers strides;
  std::int64_t offset;
  std::int64_t num_elements;
};

Place random_place(const Integers& lengths) {
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

std::int64_t at(const Place& place, const Integers& indices) {
  std::int64_t found = place.offset;
  for (std::size_t i = 0; i < indices.size(); ++i) found += indices[i] * place.strides[i];
  return found;
}

Integers random_lengths(std::int64_t longest) {
  Integers lengths(static_cast<std::size_t>(random(0, 4)));
  for (std::int64_t& length : lengths) length = random(0, 20) == 0 ? 0 : random(1, longest);
  return lengths;
}

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

void check_copy(const Integers& lengths, std::int64_t itemsize, int num_threads) {
  const Place source = random_place(lengths), target = random_place(lengths);
  // Exactly as large as needed, so that a byte too far is found.
  std::vector<char> from(static_cast<std::size_t>(source.num_elements * itemsize));
  for (char& byte : from) byte = static_cast<char>(random(-128, 127));
  std::vector<char> into(static_cast<std::size_t>(target.num_elements * itemsize), 77);
  std::vector<char> expected = into;
  for_each(lengths, [&](const Integers& indices) {
    std::copy_n(&from[static_cast<std::size_t>(at(source, indices) * itemsize)], itemsize,
                &expected[static_cast<std::size_t>(at(target, indices) * itemsize)]);
  });
  const tritondt::CopyTable table(
      {{0, 0, source.offset, target.offset, itemsize, lengths, source.strides, target.strides}});
  table.run({address(from.data())}, {address(into.data())}, num_threads);
  CHECK(into == expected);
}

template <typename Element>
void check_reduction(const Integers& lengths, const char* dtype, int num_threads) {
  const Place target = random_place(lengths);
  const std::int64_t num_slots = random(1, 5);
  std::vector<Element> into(static_cast<std::size_t>(target.num_elements), Element{7});
  std::vector<Element> expected = into;
  std::vector<std::vector<Element>> slots;
  std::vector<std::uintptr_t> sources;
  tritondt::ReduceBox box = {0, target.offset, lengths, target.strides, {}};
  std::vector<Place> places;
  for (std::int64_t slot = 0; slot < num_slots; ++slot) {
    places.push_back(random_place(lengths));
    slots.emplace_back(static_cast<std::size_t>(places.back().num_elements));
    for (Element& element : slots.back()) element = static_cast<Element>(random(-9, 9));
    sources.push_back(address(slots.back().data()));
    box.slots.push_back({slot, places.back().offset, places.back().strides});
  }
  for_each(lengths, [&](const Integers& indices) {
    Element sum = 0;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      sum += slots[i][static_cast<std::size_t>(at(places[i], indices))];
    }
    expected[static_cast<std::size_t>(at(target, indices))] = sum;
  });
  const tritondt::ReduceTable table({box}, "sum", dtype, 1);
  table.run(sources, {address(into.data())}, num_threads);
  CHECK(into == expected);
}

}  // namespace

void check_copies() {
  constexpr std::int64_t kItemsizes[] = {1, 2, 4, 8, 16};
  for (int i = 0; i < 600; ++i) check_copy(random_lengths(12), kItemsizes[i % 5], 1);
  // Large enough for three threads.
  for (int i = 0; i < 3; ++i) check_copy({random(500, 700), random(500, 700), 3}, 4, 3);
}

void check_reductions() {
  for (int i = 0; i < 150; ++i) {
    check_reduction<float>(random_lengths(12), "float32", 1);
    check_reduction<double>(random_lengths(12), "float64", 1);
    check_reduction<std::int32_t>(random_lengths(12), "int32", 1);
    check_reduction<std::int64_t>(random_lengths(12), "int64", 1);
  }
  for (int i = 0; i < 2; ++i) {
    check_reduction<float>({random(500, 700), random(500, 700), 2}, "float32", 3);
  }
}
