// Random boxes, copied and reduced, against loops that know one element at a time.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "boxes/strided_copy.h"
#include "boxes/strided_reduce.h"
#include "check.h"
#include "places.h"

namespace {

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
