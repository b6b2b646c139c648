#include "transport/byte_moves.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "boxes/line_writer.h"

namespace tritondt {

void copy_result(char* target, const char* source, std::uint64_t num_bytes, bool is_past_cache) {
  if (is_past_cache) {
    copy_past_cache(target, source, static_cast<std::int64_t>(num_bytes));
  } else {
    std::memcpy(target, source, num_bytes);
  }
}

void check_chunk(std::uint64_t chunk_bytes) {
  if (chunk_bytes == 0 || chunk_bytes % 64 != 0) {
    throw std::invalid_argument("chunks of " + std::to_string(chunk_bytes) +
                                " bytes; allowed are multiples of 64");
  }
}

void check_span(const Span& span, std::size_t num_tensors) {
  if (span.num_bytes > 0 && span.tensor >= num_tensors) {
    throw std::invalid_argument("bytes of tensor " + std::to_string(span.tensor) + " of " +
                                std::to_string(num_tensors));
  }
}

void check_lengths(const Span& source, const Span& target) {
  if (source.num_bytes != target.num_bytes) {
    throw std::invalid_argument(std::to_string(source.num_bytes) + " bytes are to go where " +
                                std::to_string(target.num_bytes) + " bytes are to lie");
  }
}

ByteMoves::ByteMoves(std::uint64_t chunk_bytes, std::vector<PeerSpan> sends,
                     std::vector<PeerSpan> receives, std::vector<Kept> keeps, bool is_past_cache)
    : chunk_bytes_(chunk_bytes),
      sends_(std::move(sends)),
      receives_(std::move(receives)),
      keeps_(std::move(keeps)),
      is_past_cache_(is_past_cache) {
  check_chunk(chunk_bytes);
  for (const auto& [from, to] : keeps_) check_lengths(from, to);
  const auto count = [this](const Span& span) {
    const std::size_t needed = (span.num_bytes + chunk_bytes_ - 1) / chunk_bytes_;
    num_rounds_ = std::max({num_rounds_, needed, std::size_t{1}});
  };
  for (const auto& [peer, span] : sends_) {
    const auto found = std::find(packed_.begin(), packed_.end(), span);
    positions_.push_back(static_cast<std::size_t>(found - packed_.begin()));
    if (found == packed_.end()) packed_.push_back(span);
    count(span);
  }
  for (const auto& [peer, span] : receives_) count(span);
  if (!keeps_.empty()) num_rounds_ = std::max(num_rounds_, std::size_t{1});
}

bool ByteMoves::is_moved(const Span& span, std::size_t round) const {
  return round == 0 || chunk_of(span, round, chunk_bytes_) > 0;
}

void ByteMoves::check(const Operands& operands) const {
  for (const Span& span : packed_) check_span(span, operands.sources.size());
  for (const auto& [peer, span] : receives_) check_span(span, operands.targets.size());
  for (const auto& [from, to] : keeps_) {
    check_span(from, operands.sources.size());
    check_span(to, operands.targets.size());
  }
}

void ByteMoves::list(std::size_t round, std::vector<SlotMessage>* sends,
                     std::vector<SlotMessage>* receives) const {
  for (std::size_t i = 0; i < sends_.size(); ++i) {
    const auto& [peer, span] = sends_[i];
    if (!is_moved(span, round)) continue;
    sends->push_back({peer, positions_[i] * chunk_bytes_, chunk_of(span, round, chunk_bytes_)});
  }
  for (const auto& [peer, span] : receives_) {
    if (!is_moved(span, round)) continue;
    receives->push_back({peer, 0, chunk_of(span, round, chunk_bytes_)});
  }
}

void ByteMoves::pack(std::size_t round, const Operands& operands, std::uintptr_t slot) const {
  for (std::size_t i = 0; i < packed_.size(); ++i) {
    const Span& span = packed_[i];
    const std::uint64_t num_bytes = chunk_of(span, round, chunk_bytes_);
    if (num_bytes == 0) continue;
    std::memcpy(reinterpret_cast<char*>(slot) + i * chunk_bytes_,
                address_of(operands.sources, span, round * chunk_bytes_), num_bytes);
  }
}

void ByteMoves::keep(std::size_t round, const Operands& operands) const {
  if (round > 0) return;
  for (const auto& [from, to] : keeps_) {
    if (from.num_bytes == 0) continue;
    char* const target = address_of(operands.targets, to, 0);
    const char* const source = address_of(operands.sources, from, 0);
    if (target != source) copy_result(target, source, from.num_bytes, is_past_cache_);
  }
}

void ByteMoves::unpack(std::size_t round, const Operands& operands,
                       const Addresses& arrived) const {
  for (const auto& [peer, span] : receives_) {
    const std::uint64_t num_bytes = chunk_of(span, round, chunk_bytes_);
    if (num_bytes == 0) continue;
    copy_result(address_of(operands.targets, span, round * chunk_bytes_),
                reinterpret_cast<const char*>(arrived[peer]), num_bytes, is_past_cache_);
  }
}

}  // namespace tritondt
