#include "transport/reductions.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace tritondt {
namespace {

void check_reducer(const Reducer& reducer) {
  check_chunk(reducer.chunk_bytes);
  if (reducer.own >= reducer.places.size()) {
    throw std::invalid_argument("position " + std::to_string(reducer.own) + " of " +
                                std::to_string(reducer.places.size()));
  }
}

}  // namespace

void Reducer::run(const char* own_term, const Addresses& arrived, char* target,
                  std::uint64_t num_bytes) const {
  const auto num_terms = static_cast<std::int64_t>(places.size());
  alignas(64) char accumulators[kAccumulatorBytes];
  ReducePass pass = {};
  pass.accumulators = accumulators;
  pass.divisor = divisor;
  // Few terms need no accumulators, whose size is a limit otherwise.
  const std::uint64_t batch_bytes = num_terms <= kMaxGroupSlots ? num_bytes : kBatchBytes;
  for (std::uint64_t begin = 0; begin < num_bytes; begin += batch_bytes) {
    const std::uint64_t count = std::min(batch_bytes, num_bytes - begin);
    pass.num_elements = static_cast<std::int64_t>(count) / kernel.itemsize;
    for (std::int64_t first = 0; first < num_terms; first += kMaxGroupSlots) {
      pass.num_slots = std::min(kMaxGroupSlots, num_terms - first);
      for (std::int64_t k = 0; k < pass.num_slots; ++k) {
        const auto position = static_cast<std::size_t>(first + k);
        pass.slots[k] =
            begin +
            (position == own ? own_term : reinterpret_cast<const char*>(arrived[places[position]]));
      }
      pass.is_first = first == 0;
      pass.target = first + pass.num_slots == num_terms ? target + begin : nullptr;
      kernel.run(pass);
    }
  }
}

SpanReduction::SpanReduction(Reducer reducer, Span source, Span target, std::uint64_t stride)
    : reducer_(std::move(reducer)), source_(source), target_(target), stride_(stride) {
  check_reducer(reducer_);
  check_lengths(source_, target_);
  for (std::size_t i = 0; i < reducer_.places.size(); ++i) {
    if (reducer_.places[i] != i || stride_ < source_.num_bytes) {
      throw std::invalid_argument("place " + std::to_string(reducer_.places[i]) + " of position " +
                                  std::to_string(i) + ", and terms of " +
                                  std::to_string(source_.num_bytes) + " bytes " +
                                  std::to_string(stride_) + " apart");
    }
  }
}

void SpanReduction::run(const Addresses& sources, const Addresses& targets) const {
  if (sources.empty()) throw std::invalid_argument("a reduction without a buffer of terms");
  check_span(source_, sources.size() - 1);
  check_span(target_, targets.size());
  Addresses terms(reducer_.places.size());
  std::uintptr_t next = sources.back();
  for (std::size_t i = 0; i < terms.size(); ++i) {
    if (i == reducer_.own) continue;
    terms[i] = next;
    next += stride_;
  }
  reducer_.run(address_of(sources, source_, 0), terms, address_of(targets, target_, 0),
               source_.num_bytes);
}

OneShotReduction::OneShotReduction(Reducer reducer, Span source, Span target, std::int64_t root)
    : reducer_(std::move(reducer)), source_(source), target_(target), root_(root) {
  check_reducer(reducer_);
  check_lengths(source_, target_);
}

void OneShotReduction::check(const Operands& operands) const {
  check_span(source_, operands.sources.size());
  check_span(target_, operands.targets.size());
}

std::size_t OneShotReduction::num_rounds() const {
  return (source_.num_bytes + reducer_.chunk_bytes - 1) / reducer_.chunk_bytes;
}

void OneShotReduction::list(std::size_t round, std::vector<SlotMessage>* sends,
                            std::vector<SlotMessage>* receives) const {
  const std::uint64_t num_bytes = chunk_of(source_, round, reducer_.chunk_bytes);
  for (std::size_t other = 0; other < reducer_.places.size(); ++other) {
    if (other == reducer_.own) continue;
    if (reads(other)) sends->push_back({reducer_.places[other], 0, num_bytes});
    if (reads(reducer_.own)) receives->push_back({reducer_.places[other], 0, num_bytes});
  }
}

void OneShotReduction::pack(std::size_t round, const Operands& operands,
                            std::uintptr_t slot) const {
  if (root_ >= 0 && reads(reducer_.own)) return;  // nobody reads the root's
  std::memcpy(reinterpret_cast<char*>(slot),
              address_of(operands.sources, source_, round * reducer_.chunk_bytes),
              chunk_of(source_, round, reducer_.chunk_bytes));
}

void OneShotReduction::unpack(std::size_t round, const Operands& operands,
                              const Addresses& arrived) const {
  if (!reads(reducer_.own)) return;
  const std::uint64_t offset = round * reducer_.chunk_bytes;
  reducer_.run(address_of(operands.sources, source_, offset), arrived,
               address_of(operands.targets, target_, offset),
               chunk_of(source_, round, reducer_.chunk_bytes));
}

PiecewiseReduction::PiecewiseReduction(Reducer reducer, std::vector<Span> pieces,
                                       std::vector<Span> results, bool is_past_cache)
    : reducer_(std::move(reducer)),
      pieces_(std::move(pieces)),
      results_(std::move(results)),
      is_past_cache_(is_past_cache) {
  check_reducer(reducer_);
  const std::size_t num_ranks = reducer_.places.size();
  if (pieces_.size() != num_ranks || (results_.size() != 1 && results_.size() != num_ranks)) {
    throw std::invalid_argument("a reduction among " + std::to_string(num_ranks) + " ranks of " +
                                std::to_string(pieces_.size()) + " pieces to " +
                                std::to_string(results_.size()));
  }
  for (std::size_t i = 0; i < results_.size(); ++i) {
    check_lengths(pieces_[gathers() ? i : reducer_.own], results_[i]);
  }
  for (const Span& piece : pieces_) {
    num_chunks_ = std::max<std::size_t>(
        num_chunks_, (piece.num_bytes + reducer_.chunk_bytes - 1) / reducer_.chunk_bytes);
  }
}

void PiecewiseReduction::check(const Operands& operands) const {
  for (const Span& piece : pieces_) check_span(piece, operands.sources.size());
  for (const Span& result : results_) check_span(result, operands.targets.size());
}

std::uint64_t PiecewiseReduction::chunk(std::size_t position, std::size_t round) const {
  return chunk_of(pieces_[position], chunk_number(round), reducer_.chunk_bytes);
}

// Calls visit(position, number) of every other rank, numbered one by one.
template <typename Visit>
void PiecewiseReduction::for_others(const Visit& visit) const {
  std::size_t number = 0;
  for (std::size_t other = 0; other < reducer_.places.size(); ++other) {
    if (other != reducer_.own) visit(other, number++);
  }
}

void PiecewiseReduction::list(std::size_t round, std::vector<SlotMessage>* sends,
                              std::vector<SlotMessage>* receives) const {
  const std::uint64_t own_bytes = chunk(reducer_.own, round);
  for_others([&](std::size_t other, std::size_t number) {
    const std::uint64_t bytes_of_other = chunk(other, round);
    const bool is_of_terms = this->is_of_terms(round);
    const std::uint64_t leaving = is_of_terms ? bytes_of_other : own_bytes;
    const std::uint64_t coming = is_of_terms ? own_bytes : bytes_of_other;
    const std::uint64_t offset = is_of_terms ? number * reducer_.chunk_bytes : 0;
    if (leaving > 0) sends->push_back({reducer_.places[other], offset, leaving});
    if (coming > 0) receives->push_back({reducer_.places[other], 0, coming});
  });
}

void PiecewiseReduction::pack(std::size_t round, const Operands& operands,
                              std::uintptr_t slot) const {
  char* const begin = reinterpret_cast<char*>(slot);
  const std::uint64_t offset = chunk_number(round) * reducer_.chunk_bytes;
  if (!is_of_terms(round)) {
    std::memcpy(begin, address_of(operands.targets, own_result(), offset),
                chunk(reducer_.own, round));
    return;
  }
  for_others([&](std::size_t other, std::size_t number) {
    std::memcpy(begin + number * reducer_.chunk_bytes,
                address_of(operands.sources, pieces_[other], offset), chunk(other, round));
  });
}

void PiecewiseReduction::unpack(std::size_t round, const Operands& operands,
                                const Addresses& arrived) const {
  const std::uint64_t offset = chunk_number(round) * reducer_.chunk_bytes;
  if (is_of_terms(round)) {
    const std::uint64_t num_bytes = chunk(reducer_.own, round);
    if (num_bytes == 0) return;
    reducer_.run(address_of(operands.sources, pieces_[reducer_.own], offset), arrived,
                 address_of(operands.targets, own_result(), offset), num_bytes);
    return;
  }
  for_others([&](std::size_t other, std::size_t) {
    const std::uint64_t num_bytes = chunk(other, round);
    if (num_bytes == 0) return;
    copy_result(address_of(operands.targets, results_[other], offset),
                reinterpret_cast<const char*>(arrived[reducer_.places[other]]), num_bytes,
                is_past_cache_);
  });
}

}  // namespace tritondt
