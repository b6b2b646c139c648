#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "transport/arena_program.h"

namespace tritondt {

// Bytes of tensor number `tensor`, from `start` on.
struct Span {
  std::size_t tensor;
  std::uint64_t start;
  std::uint64_t num_bytes;

  bool operator==(const Span& other) const {
    return tensor == other.tensor && start == other.start && num_bytes == other.num_bytes;
  }
};

// The part of a span that one round moves.
inline std::uint64_t chunk_of(const Span& span, std::size_t round, std::uint64_t chunk_bytes) {
  const std::uint64_t begin = round * chunk_bytes;
  return begin >= span.num_bytes ? 0 : std::min(chunk_bytes, span.num_bytes - begin);
}

inline char* address_of(const Addresses& tensors, const Span& span, std::uint64_t offset) {
  return reinterpret_cast<char*>(tensors[span.tensor]) + span.start + offset;
}

// Throws std::invalid_argument where a span of bytes is of a tensor that is not among
// `num_tensors`.
void check_span(const Span& span, std::size_t num_tensors);
// Throws std::invalid_argument where a source and its target are of two lengths.
void check_lengths(const Span& source, const Span& target);

// Bytes that go from tensors of some ranks to tensors of others, `chunk_bytes` of each message in a
// round: gathers, scatters, broadcasts and all-to-alls, and, of no bytes at all, barriers.
//
// What several peers receive is packed once. Messages without bytes are sent in the first round.
class ByteMoves : public ArenaProgram {
 public:
  using PeerSpan = std::pair<std::size_t, Span>;
  using Kept = std::pair<Span, Span>;  // from a source to a target

  // `sends` are of sources and `receives` of targets, by place of the peer. `chunk_bytes` is alike
  // on all ranks; targets are written past the cache where `is_past_cache`. Throws
  // std::invalid_argument for one that is no multiple of 64, and for kept spans of two lengths.
  ByteMoves(std::uint64_t chunk_bytes, std::vector<PeerSpan> sends, std::vector<PeerSpan> receives,
            std::vector<Kept> keeps, bool is_past_cache);

  std::size_t num_rounds() const override { return num_rounds_; }
  void check(const Operands& operands) const override;
  void list(std::size_t round, std::vector<SlotMessage>* sends,
            std::vector<SlotMessage>* receives) const override;
  void pack(std::size_t round, const Operands& operands, std::uintptr_t slot) const override;
  void keep(std::size_t round, const Operands& operands) const override;
  void unpack(std::size_t round, const Operands& operands, const Addresses& arrived) const override;

 private:
  bool is_moved(const Span& span, std::size_t round) const;

  const std::uint64_t chunk_bytes_;
  const std::vector<PeerSpan> sends_, receives_;
  const std::vector<Kept> keeps_;
  std::vector<Span> packed_;            // each once
  std::vector<std::size_t> positions_;  // of a send's span among them
  const bool is_past_cache_;
  std::size_t num_rounds_ = 0;
};

// Copies bytes that do not overlap to a target, past the cache or not.
void copy_result(char* target, const char* source, std::uint64_t num_bytes, bool is_past_cache);

// Throws std::invalid_argument for chunks that do not lie side by side in lines of the cache.
void check_chunk(std::uint64_t chunk_bytes);

}  // namespace tritondt
