#include "boxes/strided_cast.h"

#include <algorithm>
#include <atomic>

#include "boxes/cast_plane.h"
#include "cpu/small_floats.h"

namespace tritondt {
namespace {

CastPiece make_piece(LoopNest nest, std::size_t box, std::int64_t itemsize) {
  CastPiece piece;
  piece.box = box;
  piece.is_transposed = bring_source_dim_inward(&nest);
  pad_to_plane(&nest);
  const std::int64_t num_bytes = nest.num_elements() * itemsize;
  const std::int64_t longest = nest.lengths[longest_dim(nest)];
  piece.slices = {num_bytes, longest, num_bytes / longest};
  // Of a single loop a row would be one element.
  piece.may_advance_with_others = !piece.is_transposed && nest.lengths[0] > 1;
  piece.nest = std::move(nest);
  return piece;
}

CastPiece cut(const CastPiece& piece, std::int64_t first, std::int64_t end) {
  CastPiece part = piece;
  part.nest = slice(piece.nest, longest_dim(piece.nest), first, end);
  return part;
}

CastPlane plane_of(const CastPiece& piece, std::int64_t num_rows, std::int64_t num_columns) {
  const std::size_t columns = piece.nest.lengths.size() - 1;
  const std::vector<std::int64_t>& target = piece.nest.operands[0].strides;
  const std::vector<std::int64_t>& source = piece.nest.operands[1].strides;
  return {num_rows,
          num_columns,
          {target[columns - 1], target[columns]},
          {source[columns - 1], source[columns]},
          piece.is_transposed};
}

// The bits of the smallest power of two, 2^-126 or more, by which a magnitude is divided to be
// `target_max` or less; of 1 for a magnitude of 0.
std::uint32_t scale_bits(std::uint32_t magnitude, std::uint32_t target_max) {
  constexpr std::uint32_t kMantissa = (1u << 23) - 1;
  if (magnitude == 0) return bits_of(1.0f);
  const std::uint32_t carry = (magnitude & kMantissa) > (target_max & kMantissa) ? 1 : 0;
  const std::int32_t exponent = static_cast<std::int32_t>((magnitude >> 23) + carry + 127) -
                                static_cast<std::int32_t>(target_max >> 23);
  return static_cast<std::uint32_t>(std::max(exponent, 1)) << 23;
}

void check_scales(std::uintptr_t scales, std::size_t num_boxes) {
  if (num_boxes == 0 || (scales != 0 && scales % sizeof(float) == 0)) return;
  throw std::invalid_argument("the address of scales is " + std::to_string(scales) +
                              "; it must be a multiple of 4 and not null");
}

}  // namespace

CastBoxes::CastBoxes(CastVerb verb, const std::vector<CastBox>& boxes,
                     const std::string& source_dtype, const std::string& target_dtype)
    : kernel_(find_cast_kernel(verb, source_dtype, target_dtype)), num_given_boxes_(boxes.size()) {
  const std::int64_t itemsize = std::max(kernel_.source_itemsize, kernel_.target_itemsize);
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const CastBox& box = boxes[i];
    LoopNest nest =
        make_loop_nest(i, {kernel_.target_itemsize, kernel_.source_itemsize}, "source", box.lengths,
                       {{box.target, box.target_offset, box.target_strides},
                        {box.source, box.source_offset, box.source_strides}});
    if (nest.num_elements() == 0) continue;
    nest = coalesce(nest);
    num_dims_ = std::max(num_dims_, nest.lengths.size());
    pieces_.push_back(make_piece(std::move(nest), i, itemsize));
    num_bytes_ += pieces_.back().slices.num_bytes;
  }
  sweeps_ = make_sweeps_of(pieces_);
}

void CastBoxes::check(const Pointers& sources, const Pointers& targets) const {
  for (const CastPiece& piece : pieces_) {
    check_pointers(piece.nest, {kernel_.target_itemsize, kernel_.source_itemsize}, sources,
                   targets);
  }
}

void CastBoxes::cast(const Pointers& sources, const Pointers& targets,
                     const std::vector<float>& factors, int num_threads) const {
  const std::int64_t written = num_bytes_ /
                               std::max(kernel_.source_itemsize, kernel_.target_itemsize) *
                               kernel_.target_itemsize;
  run_sweeps(pieces_, sweeps_, num_bytes_, goes_past_cache(written), num_threads, sources, targets,
             cut, [&] {
               return [&, caster = PlaneCaster(kernel_)](
                          const CastPiece& piece, std::int64_t num_rows, std::int64_t num_columns,
                          char* target, const char* source, LineWriter* writer) mutable {
                 caster.run(plane_of(piece, num_rows, num_columns), target, source,
                            factors.empty() ? 1.0f : factors[piece.box], writer);
               };
             });
}

std::vector<std::uint32_t> CastBoxes::largest_magnitudes(const Pointers& sources,
                                                         const Pointers& targets,
                                                         int num_threads) const {
  std::vector<std::atomic<std::uint32_t>> largest(num_given_boxes_);
  run_sweeps(pieces_, sweeps_, num_bytes_, false, num_threads, sources, targets, cut, [&] {
    return [&, caster = PlaneCaster(kernel_)](const CastPiece& piece, std::int64_t num_rows,
                                              std::int64_t num_columns, char*, const char* source,
                                              LineWriter*) mutable {
      const std::uint32_t found =
          caster.largest_magnitude(plane_of(piece, num_rows, num_columns), source);
      std::atomic<std::uint32_t>& known = largest[piece.box];
      std::uint32_t before = known.load(std::memory_order_relaxed);
      while (before < found &&
             !known.compare_exchange_weak(before, found, std::memory_order_relaxed)) {
      }
    };
  });
  return {largest.begin(), largest.end()};
}

void CastTable::run(const std::vector<std::uintptr_t>& sources,
                    const std::vector<std::uintptr_t>& targets, int num_threads) const {
  check(sources, targets);
  cast(sources, targets, {}, num_threads);
}

void QuantizeTable::run(const std::vector<std::uintptr_t>& sources,
                        const std::vector<std::uintptr_t>& targets, std::uintptr_t scales,
                        int num_threads) const {
  check(sources, targets);
  check_scales(scales, num_given_boxes_);
  float* const written = reinterpret_cast<float*>(scales);
  std::vector<float> factors;
  for (const std::uint32_t magnitude : largest_magnitudes(sources, targets, num_threads)) {
    const float scale = float_of(scale_bits(magnitude, bits_of(kernel_.target_max)));
    written[factors.size()] = scale;
    factors.push_back(1.0f / scale);
  }
  cast(sources, targets, factors, num_threads);
}

void DequantizeTable::run(const std::vector<std::uintptr_t>& sources,
                          const std::vector<std::uintptr_t>& targets, std::uintptr_t scales,
                          int num_threads) const {
  check(sources, targets);
  check_scales(scales, num_given_boxes_);
  const float* const read = reinterpret_cast<const float*>(scales);
  cast(sources, targets, {read, read + num_given_boxes_}, num_threads);
}

}  // namespace tritondt
