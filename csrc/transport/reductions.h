#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "boxes/reduce_kernels.h"
#include "transport/byte_moves.h"

namespace tritondt {

// What reduces terms of all ranks, in the order of `places`, so that the bits are the same on every
// rank; `own` is this rank's position there. Chunks as in ByteMoves.
struct Reducer {
  ReduceKernel kernel;
  std::int64_t divisor;
  std::vector<std::size_t> places;
  std::size_t own;
  std::uint64_t chunk_bytes;

  std::size_t place() const { return places[own]; }
  // Reduces `num_bytes` at `own_term` here and at `arrived` of the others; `target` may be
  // `own_term`.
  void run(const char* own_term, const Addresses& arrived, char* target,
           std::uint64_t num_bytes) const;
};

// The terms of one span, of a tensor here and, for each other rank, in the last source, where they
// lie `stride` bytes apart in the order of ranks, reduced to a target.
class SpanReduction {
 public:
  // `target` may be `source`, and overlaps it in no other way. Throws std::invalid_argument.
  SpanReduction(Reducer reducer, Span source, Span target, std::uint64_t stride);

  // Throws std::invalid_argument where a tensor is not there.
  void run(const Addresses& sources, const Addresses& targets) const;
  // Bytes that one run reads.
  std::uint64_t num_bytes() const { return source_.num_bytes * reducer_.places.size(); }

 private:
  const Reducer reducer_;
  const Span source_, target_;
  const std::uint64_t stride_;
};

// A reduction without a second round: everybody reads all terms, or the rank at position `root`
// alone.
class OneShotReduction : public ArenaProgram {
 public:
  // `source` is this rank's term and `target` where it wants the result, the same bytes or others;
  // `root` -1 for all. Throws std::invalid_argument.
  OneShotReduction(Reducer reducer, Span source, Span target, std::int64_t root);

  std::size_t num_rounds() const override;
  void check(const Operands& operands) const override;
  void list(std::size_t round, std::vector<SlotMessage>* sends,
            std::vector<SlotMessage>* receives) const override;
  void pack(std::size_t round, const Operands& operands, std::uintptr_t slot) const override;
  void keep(std::size_t, const Operands&) const override {}
  void unpack(std::size_t round, const Operands& operands, const Addresses& arrived) const override;

 private:
  bool reads(std::size_t position) const {
    return root_ < 0 || static_cast<std::size_t>(root_) == position;
  }

  const Reducer reducer_;
  const Span source_, target_;
  const std::int64_t root_;
};

// A reduction in pieces: the rank at a position reduces the piece of that position and, where
// results are gathered, sends it to all. Rounds of terms and of results take turns.
class PiecewiseReduction : public ArenaProgram {
 public:
  // `pieces` of sources by position. `results` of targets: by position where all ranks want all of
  // them, else this rank's alone. A result may be its piece, and overlaps no other one. What is
  // gathered is written past the cache where `is_past_cache`. Throws std::invalid_argument.
  PiecewiseReduction(Reducer reducer, std::vector<Span> pieces, std::vector<Span> results,
                     bool is_past_cache);

  std::size_t num_rounds() const override { return num_chunks_ * (gathers() ? 2 : 1); }
  void check(const Operands& operands) const override;
  void list(std::size_t round, std::vector<SlotMessage>* sends,
            std::vector<SlotMessage>* receives) const override;
  void pack(std::size_t round, const Operands& operands, std::uintptr_t slot) const override;
  void keep(std::size_t, const Operands&) const override {}
  void unpack(std::size_t round, const Operands& operands, const Addresses& arrived) const override;

 private:
  bool gathers() const { return results_.size() > 1; }
  bool is_of_terms(std::size_t round) const { return !gathers() || round % 2 == 0; }
  std::size_t chunk_number(std::size_t round) const { return gathers() ? round / 2 : round; }
  std::uint64_t chunk(std::size_t position, std::size_t round) const;
  const Span& own_result() const { return results_[gathers() ? reducer_.own : 0]; }
  template <typename Visit>
  void for_others(const Visit& visit) const;

  const Reducer reducer_;
  const std::vector<Span> pieces_, results_;
  const bool is_past_cache_;
  std::size_t num_chunks_ = 0;
};

}  // namespace tritondt
