// Boxes cast there and back, boxes that advance together past the cache, and the writer beneath.
#include <cstring>

#include "boxes/line_writer.h"
#include "boxes/strided_cast.h"
#include "boxes/strided_copy.h"
#include "check.h"
#include "places.h"

namespace {

using tritondt::CastBox;

// The elements of a box at their places, and 7 in between.
template <typename Element>
std::vector<Element> placed(const Integers& lengths, const Place& place) {
  std::vector<Element> elements(static_cast<std::size_t>(place.num_elements), Element{7});
  // 4 comes first and is the largest: fp8 holds all of them, and halves of them, exactly.
  std::int64_t number = 0;
  for_each(lengths, [&](const Integers& indices) {
    elements[static_cast<std::size_t>(at(place, indices))] = static_cast<Element>(4 - number++ % 9);
  });
  return elements;
}

void check_cast(const Integers& lengths, int num_threads) {
  const Place source = random_place(lengths), target = random_place(lengths);
  const std::vector<float> from = placed<float>(lengths, source);
  std::vector<double> into(static_cast<std::size_t>(target.num_elements), 7);
  const tritondt::CastTable table(
      {{0, 0, source.offset, target.offset, lengths, source.strides, target.strides}}, "float32",
      "float64");
  table.run({address(from.data())}, {address(into.data())}, num_threads);
  CHECK(into == placed<double>(lengths, target));
}

void check_quantization(const Integers& lengths, int num_threads) {
  const Place source = random_place(lengths), wire = random_place(lengths),
              target = random_place(lengths);
  const std::vector<float> from = placed<float>(lengths, source);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(wire.num_elements), 7);
  std::vector<float> into(static_cast<std::size_t>(target.num_elements), 7);
  std::vector<float> scales(1, -1);
  const tritondt::QuantizeTable there(
      {{0, 0, source.offset, wire.offset, lengths, source.strides, wire.strides}}, "float32",
      "float8_e4m3fn");
  const tritondt::DequantizeTable back(
      {{0, 0, wire.offset, target.offset, lengths, wire.strides, target.strides}}, "float8_e4m3fn",
      "float32");
  there.run({address(from.data())}, {address(codes.data())}, address(scales.data()), num_threads);
  back.run({address(codes.data())}, {address(into.data())}, address(scales.data()), num_threads);
  CHECK(into == placed<float>(lengths, target));
  CHECK(std::count(lengths.begin(), lengths.end(), 0) != 0 ? scales[0] == 1
                                                           : scales[0] == 1.0f / 64);
}

// Columns of a matrix, one peer's behind the other's: the pack, and with sides changed the unpack.
std::vector<CastBox> columns_of_peers(std::int64_t num_rows, const Integers& widths) {
  std::int64_t num_columns = 0;
  for (const std::int64_t width : widths) num_columns += width;
  std::vector<CastBox> boxes;
  std::int64_t first = 0;
  for (const std::int64_t width : widths) {
    boxes.push_back(
        {0, 0, first, num_rows * first, {num_rows, width}, {num_columns, 1}, {width, 1}});
    first += width;
  }
  return boxes;
}

CastBox reversed(const CastBox& box) {
  return {box.target,  box.source,         box.target_offset, box.source_offset,
          box.lengths, box.target_strides, box.source_strides};
}

tritondt::CopyBox copied(const CastBox& box) {
  return {box.source, box.target,  box.source_offset,  box.target_offset,
          4,          box.lengths, box.source_strides, box.target_strides};
}

}  // namespace

void check_line_writer() {
  for (int i = 0; i < 300; ++i) {
    const std::int64_t num_bytes = random(0, 2000);
    std::vector<char> from(static_cast<std::size_t>(num_bytes));
    for (char& byte : from) byte = static_cast<char>(random(-128, 127));
    std::vector<char> into(static_cast<std::size_t>(num_bytes), 77), expected = into;
    tritondt::LineWriter writer;
    for (std::int64_t first = 0; first < num_bytes;) {
      const std::int64_t count = std::min(num_bytes - first, random(0, random(0, 1) ? 30 : 300));
      if (random(0, 3) != 0) {
        writer.append(into.data() + first, from.data() + first, count);
        std::memcpy(expected.data() + first, from.data() + first, static_cast<std::size_t>(count));
      }
      first += count;
    }
    writer.finish();
    CHECK(into == expected);
  }
}

void check_sweeps() {
  // Few rows, and as many as are written past the cache.
  for (const std::int64_t num_rows : {300, 11'000}) {
    const Integers widths = {300, 1, 0, 513, 64, 200};
    std::vector<CastBox> there = columns_of_peers(num_rows, widths), back;
    std::vector<tritondt::CopyBox> copies_there, copies_back;
    for (const CastBox& box : there) {
      back.push_back(reversed(box));
      copies_there.push_back(copied(box));
      copies_back.push_back(copied(reversed(box)));
    }
    std::vector<float> from(static_cast<std::size_t>(num_rows * 1078));
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i % 10'007);
    std::vector<float> packed(from.size()), into(from.size());
    std::vector<double> wide(from.size());
    for (const int num_threads : {1, 3}) {
      tritondt::CopyTable(copies_there)
          .run({address(from.data())}, {address(packed.data())}, num_threads);
      tritondt::CopyTable(copies_back)
          .run({address(packed.data())}, {address(into.data())}, num_threads);
      CHECK(into == from);
      std::fill(into.begin(), into.end(), -1.0f);
      tritondt::CastTable(there, "float32", "float64")
          .run({address(from.data())}, {address(wide.data())}, num_threads);
      CHECK(std::equal(wide.begin(), wide.end(), packed.begin()));
      tritondt::CastTable(back, "float64", "float32")
          .run({address(wide.data())}, {address(into.data())}, num_threads);
      CHECK(into == from);
    }
  }
}

void check_casts() {
  for (int i = 0; i < 200; ++i) {
    check_cast(random_lengths(12), 1);
    check_quantization(random_lengths(12), 1);
  }
  for (int i = 0; i < 2; ++i) {
    check_cast({random(500, 700), random(500, 700), 2}, 3);
    check_quantization({random(500, 700), random(500, 700), 2}, 3);
  }
}
