#include "boxes/loop_nest.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>

namespace tritondt {
namespace {

[[noreturn]] void refuse(std::size_t position, const std::string& sentence) {
  throw std::invalid_argument("box " + std::to_string(position) + ": " + sentence);
}

std::int64_t checked_product(std::size_t position, std::int64_t left, std::int64_t right) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(left, right, &product)) {
    refuse(position, std::to_string(left) + " * " + std::to_string(right) +
                         " exceeds 64 bits; lengths, strides and offsets count below 2^63 bytes");
  }
  return product;
}

void check_lengths(std::size_t position, const std::vector<std::int64_t>& lengths) {
  if (lengths.size() > kMaxDims) {
    refuse(position, std::to_string(lengths.size()) + " dims; at most " + std::to_string(kMaxDims) +
                         " are allowed");
  }
  for (std::size_t dim = 0; dim < lengths.size(); ++dim) {
    if (lengths[dim] < 0) {
      refuse(position, "length " + std::to_string(lengths[dim]) + " in dim " + std::to_string(dim) +
                           "; lengths are 0 or more");
    }
  }
}

void check_operand(std::size_t position, const std::string& name, const Operand& operand,
                   const std::vector<std::int64_t>& lengths) {
  if (operand.tensor < 0) {
    refuse(position, name + " is tensor " + std::to_string(operand.tensor) +
                         "; positions in the list of tensors are 0 or more");
  }
  if (operand.strides.size() != lengths.size()) {
    refuse(position, name + " has " + std::to_string(operand.strides.size()) + " strides for " +
                         std::to_string(lengths.size()) + " lengths; one stride per length");
  }
}

void check_target_strides(std::size_t position, const Operand& target,
                          const std::vector<std::int64_t>& lengths) {
  for (std::size_t dim = 0; dim < lengths.size(); ++dim) {
    if (lengths[dim] > 1 && target.strides[dim] < 1) {
      refuse(position, "target stride " + std::to_string(target.strides[dim]) + " in dim " +
                           std::to_string(dim) + " of length " + std::to_string(lengths[dim]) +
                           "; target strides are positive where a length exceeds 1");
    }
  }
}

bool walks_as_one(const LoopNest& nest, std::size_t outer, std::size_t inner) {
  return std::all_of(nest.operands.begin(), nest.operands.end(), [&](const Operand& operand) {
    return operand.strides[outer] == operand.strides[inner] * nest.lengths[inner];
  });
}

// Dims longer than 1, by falling target stride; equal strides keep their order.
std::vector<std::size_t> loop_order(const LoopNest& nest) {
  std::vector<std::size_t> order(nest.lengths.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  order.erase(std::remove_if(order.begin(), order.end(),
                             [&](std::size_t dim) { return nest.lengths[dim] == 1; }),
              order.end());
  const std::vector<std::int64_t>& target_strides = nest.operands[0].strides;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t left, std::size_t right) {
    return target_strides[left] > target_strides[right];
  });
  return order;
}

// A stride of 0 is no dense dim: nothing is gained by tiling over it. The innermost of several
// wins.
std::size_t densest_dim(const Operand& operand) {
  std::size_t densest = operand.strides.size() - 1;
  for (std::size_t dim = densest; dim-- > 0;) {
    const std::int64_t stride = std::llabs(operand.strides[dim]);
    if (stride != 0 && stride < std::llabs(operand.strides[densest])) densest = dim;
  }
  return densest;
}

}  // namespace

std::int64_t LoopNest::num_elements() const {
  if (std::find(lengths.begin(), lengths.end(), 0) != lengths.end()) return 0;
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{1}, std::multiplies<>());
}

LoopNest make_loop_nest(std::size_t position, Itemsizes itemsizes, const char* source_name,
                        std::vector<std::int64_t> lengths, std::vector<Operand> operands) {
  check_lengths(position, lengths);
  for (std::size_t k = 0; k < operands.size(); ++k) {
    const std::string number = operands.size() > 2 ? " " + std::to_string(k - 1) : "";
    check_operand(position, k == 0 ? "target" : source_name + number, operands[k], lengths);
  }
  const bool is_empty = std::find(lengths.begin(), lengths.end(), 0) != lengths.end();
  if (!is_empty) check_target_strides(position, operands[0], lengths);

  std::int64_t num_bytes = std::max(itemsizes.target, itemsizes.source);
  for (const std::int64_t length : lengths) {
    if (!is_empty) num_bytes = checked_product(position, num_bytes, length);
  }
  for (std::size_t k = 0; k < operands.size(); ++k) {
    Operand& operand = operands[k];
    const std::int64_t itemsize = k == 0 ? itemsizes.target : itemsizes.source;
    operand.offset = checked_product(position, operand.offset, itemsize);
    for (std::size_t dim = 0; dim < lengths.size(); ++dim) {
      operand.strides[dim] = checked_product(position, operand.strides[dim], itemsize);
      checked_product(position, operand.strides[dim], lengths[dim]);
    }
  }
  return {std::move(lengths), std::move(operands)};
}

LoopNest coalesce(const LoopNest& nest) {
  LoopNest merged;
  for (const Operand& operand : nest.operands) {
    merged.operands.push_back({operand.tensor, operand.offset, {}});
  }
  const std::vector<std::size_t> order = loop_order(nest);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const bool joins_previous = i > 0 && walks_as_one(nest, order[i - 1], order[i]);
    if (joins_previous) {
      merged.lengths.back() *= nest.lengths[order[i]];
    } else {
      merged.lengths.push_back(nest.lengths[order[i]]);
    }
    for (std::size_t k = 0; k < nest.operands.size(); ++k) {
      if (joins_previous) merged.operands[k].strides.pop_back();
      merged.operands[k].strides.push_back(nest.operands[k].strides[order[i]]);
    }
  }
  return merged;
}

bool bring_source_dim_inward(LoopNest* nest) {
  if (nest->lengths.size() < 2) return false;
  const std::size_t innermost = nest->lengths.size() - 1;
  for (std::size_t k = 1; k < nest->operands.size(); ++k) {
    const std::size_t densest = densest_dim(nest->operands[k]);
    if (densest == innermost) continue;
    const auto move_inward = [&](std::vector<std::int64_t>* values) {
      std::rotate(values->begin() + densest, values->begin() + densest + 1,
                  values->begin() + innermost);
    };
    move_inward(&nest->lengths);
    for (Operand& operand : nest->operands) move_inward(&operand.strides);
    return true;
  }
  return false;
}

void pad_to_plane(LoopNest* nest) {
  while (nest->lengths.size() < 2) {
    nest->lengths.insert(nest->lengths.begin(), 1);
    for (Operand& operand : nest->operands) operand.strides.insert(operand.strides.begin(), 0);
  }
}

LoopNest slice(const LoopNest& nest, std::size_t dim, std::int64_t begin, std::int64_t end) {
  LoopNest part = nest;
  part.lengths[dim] = end - begin;
  for (Operand& operand : part.operands) operand.offset += begin * operand.strides[dim];
  return part;
}

std::size_t longest_dim(const LoopNest& nest) {
  const auto longest = std::max_element(nest.lengths.begin(), nest.lengths.end());
  return static_cast<std::size_t>(longest - nest.lengths.begin());
}

void check_pointers(const LoopNest& nest, Itemsizes alignments,
                    const std::vector<std::uintptr_t>& sources,
                    const std::vector<std::uintptr_t>& targets) {
  for (std::size_t k = 0; k < nest.operands.size(); ++k) {
    const std::vector<std::uintptr_t>& pointers = k == 0 ? targets : sources;
    const std::size_t tensor = static_cast<std::size_t>(nest.operands[k].tensor);
    const std::size_t alignment =
        static_cast<std::size_t>(k == 0 ? alignments.target : alignments.source);
    if (tensor < pointers.size() && pointers[tensor] != 0 && pointers[tensor] % alignment == 0) {
      continue;
    }
    const std::string name = k == 0 ? "target" : "source";
    const std::string subject = "a box uses " + name + " " + std::to_string(tensor);
    if (tensor >= pointers.size()) {
      throw std::invalid_argument(subject + ", but the number of pointers in " + name +
                                  "_ptrs is " + std::to_string(pointers.size()));
    }
    throw std::invalid_argument(subject + ", whose address is " + std::to_string(pointers[tensor]) +
                                "; it must be a multiple of " + std::to_string(alignment) +
                                " and not null");
  }
}

}  // namespace tritondt
