#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tritondt {

constexpr std::size_t kMaxDims = 16;

// How one tensor is walked by a nest of loops; in elements as the caller gives it, in bytes in a
// LoopNest.
struct Operand {
  std::int64_t tensor;  // position in the list of pointers that the table is run on
  std::int64_t offset;
  std::vector<std::int64_t> strides;
};

// A box as nested loops, outermost first. Operand 0 is the target, the others are sources.
struct LoopNest {
  std::vector<std::int64_t> lengths;
  std::vector<Operand> operands;

  std::int64_t num_elements() const;
};

// Bytes of an element on either side.
struct Itemsizes {
  std::int64_t target;
  std::int64_t source;
};

// Checks a box and turns elements into bytes. Throws std::invalid_argument that names box
// `position` and, for operands other than the target, `source_name`.
LoopNest make_loop_nest(std::size_t position, Itemsizes itemsizes, const char* source_name,
                        std::vector<std::int64_t> lengths, std::vector<Operand> operands);

// The same box with as few loops as possible: no loop of length 1, loops ordered by falling target
// stride, neighbours merged where every operand walks both as one.
LoopNest coalesce(const LoopNest& nest);

// Moves the loop in which a source is densest next to the innermost one, so that a tile of the two
// innermost loops covers whole cache lines on both sides. Returns false if nothing is transposed.
bool bring_source_dim_inward(LoopNest* nest);

// Adds outer loops of length 1 until there are two, the plane that kernels work on.
void pad_to_plane(LoopNest* nest);

// Indices [begin, end) of one dim.
LoopNest slice(const LoopNest& nest, std::size_t dim, std::int64_t begin, std::int64_t end);

// The longest dim, the outermost of several: where a box is best cut among threads.
std::size_t longest_dim(const LoopNest& nest);

// Throws std::invalid_argument where the nest uses a tensor that is not in its list, is null, or
// does not lie at a multiple of its side's alignment.
void check_pointers(const LoopNest& nest, Itemsizes alignments,
                    const std::vector<std::uintptr_t>& sources,
                    const std::vector<std::uintptr_t>& targets);

}  // namespace tritondt
