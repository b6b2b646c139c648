#include "boxes/strided_reduce.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "boxes/reduce_plane.h"

namespace tritondt {
namespace {

LoopNest make_nest(std::size_t position, const ReduceBox& box, std::int64_t itemsize) {
  if (box.slots.empty()) {
    throw std::invalid_argument("box " + std::to_string(position) +
                                ": no slots; a box reduces 1 slot or more");
  }
  std::vector<Operand> operands = {{box.target, box.target_offset, box.target_strides}};
  for (const Slot& slot : box.slots) operands.push_back({slot.source, slot.offset, slot.strides});
  return make_loop_nest(position, {itemsize, itemsize}, "slot", box.lengths, std::move(operands));
}

ReducePiece make_piece(LoopNest nest, std::int64_t itemsize) {
  const bool is_transposed = bring_source_dim_inward(&nest);
  pad_to_plane(&nest);
  const std::int64_t num_slots = static_cast<std::int64_t>(nest.operands.size()) - 1;
  const std::int64_t num_bytes = nest.num_elements() * num_slots * itemsize;
  const std::int64_t longest = nest.lengths[longest_dim(nest)];
  return {std::move(nest), is_transposed, {num_bytes, longest, num_bytes / longest}};
}

// `addresses`, one per operand, are moved along and come back as they were.
void reduce_loops(const LoopNest& nest, std::size_t dim, std::vector<char*>* addresses,
                  PlaneReducer* plane_reducer) {
  if (dim + 2 == nest.lengths.size()) {
    plane_reducer->run(*addresses);
    return;
  }
  const auto advance = [&](std::int64_t num_steps) {
    for (std::size_t k = 0; k < addresses->size(); ++k) {
      (*addresses)[k] += num_steps * nest.operands[k].strides[dim];
    }
  };
  for (std::int64_t i = 0; i < nest.lengths[dim]; ++i) {
    reduce_loops(nest, dim + 1, addresses, plane_reducer);
    advance(1);
  }
  advance(-nest.lengths[dim]);
}

void reduce_nest(const LoopNest& nest, PlaneReducer* plane_reducer,
                 const std::vector<std::uintptr_t>& sources,
                 const std::vector<std::uintptr_t>& targets) {
  std::vector<char*> addresses;
  addresses.reserve(nest.operands.size());
  for (std::size_t k = 0; k < nest.operands.size(); ++k) {
    const Operand& operand = nest.operands[k];
    const std::vector<std::uintptr_t>& pointers = k == 0 ? targets : sources;
    addresses.push_back(reinterpret_cast<char*>(pointers[operand.tensor]) + operand.offset);
  }
  reduce_loops(nest, 0, &addresses, plane_reducer);
}

}  // namespace

ReduceTable::ReduceTable(const std::vector<ReduceBox>& boxes, const std::string& op,
                         const std::string& dtype, std::int64_t divisor)
    : kernel_(find_reduce_kernel(dtype, op, divisor)), divisor_(divisor) {
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    LoopNest nest = make_nest(i, boxes[i], kernel_.itemsize);
    if (nest.num_elements() == 0) continue;
    nest = coalesce(nest);
    num_dims_ = std::max(num_dims_, nest.lengths.size());
    pieces_.push_back(make_piece(std::move(nest), kernel_.itemsize));
    num_bytes_ += pieces_.back().slices.num_bytes;
  }
}

void ReduceTable::run(const std::vector<std::uintptr_t>& sources,
                      const std::vector<std::uintptr_t>& targets, int num_threads) const {
  for (const ReducePiece& piece : pieces_) {
    check_pointers(piece.nest, {kernel_.alignment, kernel_.alignment}, sources, targets);
  }
  const auto reduce = [&](const LoopNest& nest, bool is_transposed) {
    PlaneReducer plane_reducer(nest, kernel_, divisor_, is_transposed);
    reduce_nest(nest, &plane_reducer, sources, targets);
  };
  run_in_threads(pieces_, num_bytes_, num_threads,
                 [&](const ReducePiece& piece, std::int64_t first, std::int64_t end) {
                   if (first == 0 && end == piece.slices.num_slices) {
                     reduce(piece.nest, piece.is_transposed);
                   } else {
                     reduce(slice(piece.nest, longest_dim(piece.nest), first, end),
                            piece.is_transposed);
                   }
                 });
}

}  // namespace tritondt
