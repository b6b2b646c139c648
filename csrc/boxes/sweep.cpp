#include "boxes/sweep.h"

#include <cstdlib>
#include <map>
#include <tuple>

namespace tritondt {
namespace {

// Below this, all fits in the second-level cache, where the order hardly matters.
constexpr std::int64_t kLeastBytes = std::int64_t{256} << 10;

// The loop of which a row is one step.
std::size_t row_dim(const LoopNest& nest) {
  for (std::size_t dim = 0; dim < nest.lengths.size(); ++dim) {
    if (nest.lengths[dim] > 1) return dim;
  }
  return nest.lengths.size() - 1;
}

bool may_share(const Piece& piece) {
  const LoopNest& nest = piece.nest;
  return piece.may_advance_with_others && nest.lengths.size() == 2 && nest.num_elements() > 1 &&
         row_dim(nest) == longest_dim(nest);
}

// Equal for pieces whose rows lie side by side in operand `side`: 0 is the target, 1 the source.
using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

Key key_of(const LoopNest& nest, std::size_t side) {
  const Operand& operand = nest.operands[side];
  const std::size_t dim = row_dim(nest);
  return {operand.tensor, operand.strides[dim], nest.lengths[dim]};
}

Sweep make_sweep(const std::vector<const Piece*>& pieces, std::vector<std::size_t> members,
                 std::size_t side) {
  const LoopNest& first = pieces[members.front()]->nest;
  const std::int64_t num_rows = first.lengths[row_dim(first)];
  std::int64_t num_bytes = 0;
  for (const std::size_t member : members) num_bytes += pieces[member]->slices.num_bytes;
  const std::int64_t row_bytes = num_bytes / num_rows;
  return {std::move(members), side == 0, row_bytes, {num_bytes, num_rows, row_bytes}};
}

// Cuts pieces of one key into groups that begin within one row.
std::vector<std::vector<std::size_t>> side_by_side(const std::vector<const Piece*>& pieces,
                                                   std::vector<std::size_t> members,
                                                   std::size_t side) {
  const auto operand = [&](std::size_t i) -> const Operand& {
    return pieces[i]->nest.operands[side];
  };
  std::stable_sort(members.begin(), members.end(), [&](std::size_t left, std::size_t right) {
    return operand(left).offset < operand(right).offset;
  });
  const std::int64_t stride =
      std::llabs(operand(members[0]).strides[row_dim(pieces[members[0]]->nest)]);
  std::vector<std::vector<std::size_t>> groups;
  for (const std::size_t member : members) {
    if (groups.empty() || operand(member).offset - operand(groups.back()[0]).offset >= stride) {
      groups.emplace_back();
    }
    groups.back().push_back(member);
  }
  return groups;
}

}  // namespace

std::vector<Sweep> make_sweeps(const std::vector<const Piece*>& pieces) {
  std::vector<Sweep> sweeps;
  std::vector<std::size_t> left(pieces.size());
  std::int64_t num_bytes = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    left[i] = i;
    num_bytes += pieces[i]->slices.num_bytes;
  }
  for (const std::size_t side : {1, 0}) {
    if (left.size() < 2 || num_bytes < kLeastBytes) break;
    std::map<Key, std::vector<std::size_t>> members;
    for (const std::size_t i : left) {
      if (may_share(*pieces[i])) members[key_of(pieces[i]->nest, side)].push_back(i);
    }
    std::vector<bool> is_taken(pieces.size());
    for (auto& [key, found] : members) {
      for (std::vector<std::size_t>& group : side_by_side(pieces, std::move(found), side)) {
        if (group.size() < 2) continue;
        for (const std::size_t i : group) is_taken[i] = true;
        sweeps.push_back(make_sweep(pieces, std::move(group), side));
      }
    }
    left.erase(std::remove_if(left.begin(), left.end(), [&](std::size_t i) { return is_taken[i]; }),
               left.end());
  }
  for (const std::size_t i : left) sweeps.push_back({{i}, false, 0, pieces[i]->slices});
  return sweeps;
}

Lane make_lane(const LoopNest& nest, const Pointers& sources, const Pointers& targets) {
  const Operand& target = nest.operands[0];
  const Operand& source = nest.operands[1];
  const std::size_t dim = row_dim(nest);
  return {reinterpret_cast<char*>(targets[target.tensor]) + target.offset,
          reinterpret_cast<const char*>(sources[source.tensor]) + source.offset,
          target.strides[dim],
          source.strides[dim],
          nest.lengths[1],
          dim == 1};
}

}  // namespace tritondt
