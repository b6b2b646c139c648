#include "transport/box_moves.h"

#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "boxes/strided_reduce.h"
#include "transport/arena_board.h"

namespace tritondt {
namespace {

// No two messages of a slot share a line of the cache.
constexpr std::uint64_t kLineBytes = 64;

std::uint64_t in_lines(std::uint64_t num_bytes) {
  return (num_bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

// Elements [start, start + numel) of a part in its order, all of which are at the positions
// [first, second) in each dim.
struct Bounds {
  std::int64_t start;
  std::int64_t numel;
  std::vector<std::pair<std::int64_t, std::int64_t>> positions;
};

// How a part is cut: into boxes of at most so many elements, about equal, which make it up one
// after the other in its order.
class PartCut {
 public:
  PartCut(const std::vector<std::int64_t>& lengths, std::int64_t most) : lengths_(lengths) {
    std::int64_t numel = 1;
    for (const std::int64_t length : lengths_) {
      if (length < 0 || __builtin_mul_overflow(numel, length, &numel)) {
        throw std::invalid_argument("a part of length " + std::to_string(length) +
                                    "; lengths are 0 or more, of fewer than 2^63 elements");
      }
    }
    inner_ = numel_ = numel;
    if (numel <= most) {
      dim_ = lengths_.size();
      return;
    }
    // The first dim of which at least one step fits is cut; those before it are cut into steps.
    while (inner_ > most) inner_ /= lengths_[dim_++];
    --dim_;
    const std::int64_t steps = most / inner_;
    num_slices_ = (lengths_[dim_] + steps - 1) / steps;
    num_pieces_ = numel / inner_ / lengths_[dim_] * num_slices_;
  }

  std::int64_t numel() const { return numel_; }
  std::int64_t num_pieces() const { return num_pieces_; }

  std::int64_t num_elements(std::int64_t piece) const {
    if (dim_ == lengths_.size()) return numel_;
    const std::int64_t number = piece % num_slices_;
    return (slice_start(number + 1) - slice_start(number)) * inner_;
  }

  Bounds bounds(std::int64_t piece) const {
    Bounds found = {0, numel_, {}};
    for (const std::int64_t length : lengths_) found.positions.emplace_back(0, length);
    if (dim_ == lengths_.size()) return found;
    const std::int64_t number = piece % num_slices_;
    const std::int64_t first = slice_start(number), end = slice_start(number + 1);
    std::int64_t row = piece / num_slices_;
    found.start = (row * lengths_[dim_] + first) * inner_;
    found.numel = (end - first) * inner_;
    found.positions[dim_] = {first, end};
    for (std::size_t dim = dim_; dim-- > 0;) {
      found.positions[dim] = {row % lengths_[dim], row % lengths_[dim] + 1};
      row /= lengths_[dim];
    }
    return found;
  }

 private:
  // length * number / num_slices_, without a product that overflows.
  std::int64_t slice_start(std::int64_t number) const {
    const std::int64_t length = lengths_[dim_];
    return length / num_slices_ * number + length % num_slices_ * number / num_slices_;
  }

  std::vector<std::int64_t> lengths_;
  std::size_t dim_ = 0;         // where it is cut; as many as there are dims where it is whole
  std::int64_t numel_, inner_;  // elements of the part, and of a step of the dim
  std::int64_t num_slices_ = 1, num_pieces_ = 1;
};

// A piece of a part, by its number there. Two are equal where they hold the same elements.
using Piece = std::pair<std::size_t, std::int64_t>;

// A piece from byte `start` on in buffer `source`, the slot of a peer's place or, behind those of
// all, the staging; or in this rank's tensor, without a source.
struct Held {
  std::optional<std::size_t> source;
  Piece piece;
  std::int64_t contribution;
  std::uint64_t start;
};

struct Arriving {
  Piece piece;
  std::int64_t contribution;
};

// The boxes of some parts, which have been checked, clipped to pieces of them.
class Parts {
 public:
  Parts(const BoxExchange& exchange, const std::vector<BoxPart>& parts, const char* name)
      : exchange_(exchange), parts_(parts), name_(name) {
    for (const BoxPart& part : parts_) {
      if (part.tensor >= exchange.itemsizes.size()) {
        refuse("is of tensor " + std::to_string(part.tensor) + " of " +
               std::to_string(exchange.itemsizes.size()));
      }
      const std::int64_t most =
          static_cast<std::int64_t>(exchange.chunk_bytes) / exchange.itemsizes[part.tensor];
      cuts_.emplace_back(part.lengths, most);
      for (const JointBox& box : part.boxes) check(part, box);
    }
  }

  const BoxPart& part(const Piece& piece) const { return parts_[piece.first]; }
  std::int64_t itemsize(const Piece& piece) const {
    return exchange_.itemsizes[part(piece).tensor];
  }
  std::uint64_t num_bytes(const Piece& piece) const {
    return static_cast<std::uint64_t>(cuts_[piece.first].num_elements(piece.second) *
                                      itemsize(piece));
  }
  bool is_reduced(const Piece& piece) const {
    return exchange_.reductions[part(piece).tensor].has_value();
  }
  const PartCut& cut(std::size_t number) const {
    if (number >= cuts_.size()) {
      throw std::invalid_argument("part " + std::to_string(number) + " of " +
                                  std::to_string(cuts_.size()) + " that are " + name_);
    }
    return cuts_[number];
  }

  // Calls visit(lengths, places) for what every box of a piece's part has of the piece.
  template <typename Visit>
  void for_boxes(const Piece& piece, const Visit& visit) const {
    const Bounds bounds = cuts_[piece.first].bounds(piece.second);
    const std::vector<JointBox>& boxes = part(piece).boxes;
    auto box = boxes.begin(), end = boxes.end();
    if (boxes.size() > 1) {  // both the first and the last elements of boxes ascend from box to box
      box = std::partition_point(
          box, end, [&](const JointBox& found) { return last_element(found) < bounds.start; });
      end = std::partition_point(box, end, [&](const JointBox& found) {
        return found.places.back().offset < bounds.start + bounds.numel;
      });
    }
    for (; box != end; ++box) {
      JointBox clipped = *box;
      if (clip(bounds, &clipped)) visit(clipped.lengths, clipped.places);
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw std::invalid_argument(std::string("a part that is ") + name_ + " " + what);
  }

  void check(const BoxPart& part, const JointBox& box) const {
    const std::size_t num_dims = part.lengths.size();
    if (box.places.size() < 2 || box.places.size() > 3 || box.lengths.size() != num_dims) {
      refuse("of " + std::to_string(num_dims) + " dims has a box of " +
             std::to_string(box.lengths.size()) + " dims in " + std::to_string(box.places.size()) +
             " storages; allowed are 2 or 3 with the message");
    }
    for (const BoxPlace& place : box.places) {
      if (place.strides.size() != num_dims) refuse("has a box with strides of other dims");
    }
    const BoxPlace& message = box.places.back();
    for (std::size_t dim = 0; dim < num_dims; ++dim) {
      if (message.strides[dim] < 1 || box.lengths[dim] < 1 ||
          box.lengths[dim] > part.lengths[dim]) {
        refuse("has an empty box, or one that is longer, or has no strides in the message");
      }
    }
    if (message.offset < 0) refuse("has a box that begins before its message");
  }

  static std::int64_t last_element(const JointBox& box) {
    std::int64_t found = box.places.back().offset;
    for (std::size_t dim = 0; dim < box.lengths.size(); ++dim) {
      found += (box.lengths[dim] - 1) * box.places.back().strides[dim];
    }
    return found;
  }

  // Cuts a box down to what lies within the bounds; false where nothing does.
  static bool clip(const Bounds& bounds, JointBox* box) {
    std::int64_t left = box->places.back().offset;
    const std::vector<std::int64_t> strides = box->places.back().strides;
    for (std::size_t dim = 0; dim < strides.size(); ++dim) {
      const auto [first, last] = bounds.positions[dim];
      const std::int64_t position = left / strides[dim];
      left %= strides[dim];
      const std::int64_t end = std::min(position + box->lengths[dim], last);
      const std::int64_t begin = std::max(position, first);
      if (end <= begin) return false;
      box->lengths[dim] = end - begin;
      for (BoxPlace& place : box->places) place.offset += (begin - position) * place.strides[dim];
    }
    return true;
  }

  const BoxExchange& exchange_;
  const std::vector<BoxPart>& parts_;
  const char* name_;
  std::vector<PartCut> cuts_;
};

// Pieces of a message, round by round, at most a chunk in each. `Found` is what is known of a piece
// beside its number: add(part, piece) makes one.
template <typename Found>
class MessageRounds {
 public:
  MessageRounds(std::size_t peer, std::uint64_t chunk_bytes)
      : peer(peer), chunk_bytes_(chunk_bytes) {}

  template <typename Add>
  void append(const Parts& parts, std::size_t part, const Add& add) {
    const PartCut& cut = parts.cut(part);
    for (std::int64_t number = 0; number < cut.num_pieces(); ++number) {
      const Piece piece = {part, number};
      const std::uint64_t num_bytes = parts.num_bytes(piece);
      if (rounds.empty() || num_bytes > room_) {
        if (rounds.size() == kMaxRounds) {
          throw std::invalid_argument("a message takes more than " + std::to_string(kMaxRounds) +
                                      " rounds of " + std::to_string(chunk_bytes_) + " bytes");
        }
        rounds.emplace_back();
        room_ = chunk_bytes_;
      }
      rounds.back().push_back(add(piece));
      room_ -= num_bytes;
    }
  }

  std::size_t peer;
  std::vector<std::vector<Found>> rounds;

 private:
  std::uint64_t chunk_bytes_, room_ = 0;
};

void check(const BoxExchange& exchange) {
  if (exchange.reductions.size() != exchange.itemsizes.size()) {
    throw std::invalid_argument(std::to_string(exchange.itemsizes.size()) + " tensors with " +
                                std::to_string(exchange.reductions.size()) + " reductions");
  }
  for (const std::int64_t itemsize : exchange.itemsizes) {
    if (itemsize < 1 || static_cast<std::uint64_t>(itemsize) > exchange.chunk_bytes ||
        exchange.chunk_bytes > std::uint64_t{1} << 62) {
      throw std::invalid_argument("elements of " + std::to_string(itemsize) +
                                  " bytes in chunks of " + std::to_string(exchange.chunk_bytes) +
                                  "; a chunk holds at least one, and at most 2^62 bytes");
    }
  }
}

ArenaRound::Run run_of(std::shared_ptr<const CopyTable> table) {
  return [table = std::move(table)](const Addresses& sources, const Addresses& targets,
                                    int num_threads) { table->run(sources, targets, num_threads); };
}

ArenaRound::Run copies(const std::vector<CopyBox>& boxes, bool is_past_cache) {
  return boxes.empty() ? nullptr : run_of(std::make_shared<CopyTable>(boxes, is_past_cache));
}

// The rounds of one exchange.
class Compilation {
 public:
  explicit Compilation(const BoxExchange& exchange)
      : exchange_(exchange),
        leaving_(exchange, exchange.leaving, "leaving"),
        arriving_(exchange, exchange.arriving, "arriving") {
    for (const auto& [peer, parts] : exchange.sends) {
      sends_.emplace_back(checked(peer), exchange.chunk_bytes);
      for (const std::size_t part : parts) {
        sends_.back().append(leaving_, part, [](const Piece& piece) { return piece; });
      }
      num_rounds_ = std::max(num_rounds_, sends_.back().rounds.size());
    }
    for (const auto& [peer, terms] : exchange.receives) {
      receives_.emplace_back(checked(peer), exchange.chunk_bytes);
      for (const BoxTerm& term : terms) {
        receives_.back().append(arriving_, term.part, [&](const Piece& piece) {
          return Arriving{piece, term.contribution};
        });
      }
      num_rounds_ = std::max(num_rounds_, receives_.back().rounds.size());
    }
    if (!exchange.keeps.empty()) num_rounds_ = std::max(num_rounds_, std::size_t{1});
    terms_.resize(num_rounds_);
    unpacks_.resize(num_rounds_);
    sort_arrivals();
    add_own_terms();
  }

  std::vector<ArenaRound> rounds() const {
    std::vector<ArenaRound> made;
    for (std::size_t number = 0; number < num_rounds_; ++number) made.push_back(round(number));
    return made;
  }

  std::uint64_t staged_bytes() const { return staged_bytes_; }

 private:
  std::size_t checked(std::size_t peer) const {
    if (peer >= exchange_.num_ranks) {
      throw std::invalid_argument("a message with place " + std::to_string(peer) + " of " +
                                  std::to_string(exchange_.num_ranks));
    }
    return peer;
  }

  // What arrives in each round: copied to its target, or a term of the round in which the last one
  // of its piece arrives, for which it waits in the staging where that is a later one.
  void sort_arrivals() {
    for (const auto& message : receives_) {
      for (std::size_t number = 0; number < message.rounds.size(); ++number) {
        for (const Arriving& found : message.rounds[number]) {
          if (!arriving_.is_reduced(found.piece)) continue;
          std::size_t& last = last_[found.piece];
          last = std::max(last, number);
        }
      }
    }
    for (const auto& message : receives_) {
      for (std::size_t number = 0; number < message.rounds.size(); ++number) {
        std::uint64_t start = 0;
        for (const Arriving& found : message.rounds[number]) {
          add_arrival(number, {message.peer, found.piece, found.contribution, start});
          start += arriving_.num_bytes(found.piece);
        }
      }
    }
  }

  void add_arrival(std::size_t number, Held held) {
    if (!arriving_.is_reduced(held.piece)) {
      add_unpacks(number, held);
      return;
    }
    const std::size_t last = last_[held.piece];
    if (number < last) {
      const std::int64_t itemsize = arriving_.itemsize(held.piece);
      const auto place = static_cast<std::int64_t>(staged_bytes_);
      const std::uint64_t num_bytes = arriving_.num_bytes(held.piece);
      unpacks_[number].push_back({static_cast<std::int64_t>(*held.source),
                                  static_cast<std::int64_t>(exchange_.itemsizes.size()),
                                  elements(held.start, itemsize),
                                  place / itemsize,
                                  itemsize,
                                  {static_cast<std::int64_t>(num_bytes) / itemsize},
                                  {1},
                                  {1}});
      held.source = exchange_.num_ranks;
      held.start = staged_bytes_;
      staged_bytes_ += in_lines(num_bytes);
    }
    terms_[last][held.piece].push_back(held);
  }

  // Terms of this rank's own are reduced with the last one of a peer's.
  void add_own_terms() {
    for (const BoxTerm& term : exchange_.own_terms) {
      for (std::int64_t number = 0; number < arriving_.cut(term.part).num_pieces(); ++number) {
        const Piece piece = {term.part, number};
        if (!arriving_.is_reduced(piece) || num_rounds_ == 0) {
          throw std::invalid_argument("a term of part " + std::to_string(term.part) +
                                      ", which nothing reduces");
        }
        const auto last = last_.find(piece);
        terms_[last == last_.end() ? 0 : last->second][piece].push_back(
            {std::nullopt, piece, term.contribution, 0});
      }
    }
  }

  // Where a piece's part would start in a buffer, in elements, if all of it were there.
  std::int64_t first_element(const Held& held) const {
    const Bounds bounds = arriving_.cut(held.piece.first).bounds(held.piece.second);
    return elements(held.start, arriving_.itemsize(held.piece)) - bounds.start;
  }

  static std::int64_t elements(std::uint64_t start, std::int64_t itemsize) {
    if (start % static_cast<std::uint64_t>(itemsize) != 0) {
      throw std::invalid_argument("elements of " + std::to_string(itemsize) + " bytes at byte " +
                                  std::to_string(start) +
                                  " of a message; parts of longer elements come first");
    }
    return static_cast<std::int64_t>(start) / itemsize;
  }

  void add_packs(const Piece& piece, std::uint64_t start, std::vector<CopyBox>* packs) const {
    const std::int64_t itemsize = leaving_.itemsize(piece);
    const auto tensor = static_cast<std::int64_t>(leaving_.part(piece).tensor);
    const std::int64_t begin =
        elements(start, itemsize) - leaving_.cut(piece.first).bounds(piece.second).start;
    leaving_.for_boxes(piece, [&](const auto& lengths, const std::vector<BoxPlace>& places) {
      packs->push_back({tensor, 0, places.front().offset, begin + places.back().offset, itemsize,
                        lengths, places.front().strides, places.back().strides});
    });
  }

  void add_unpacks(std::size_t number, const Held& held) {
    const std::int64_t itemsize = arriving_.itemsize(held.piece), begin = first_element(held);
    const auto tensor = static_cast<std::int64_t>(arriving_.part(held.piece).tensor);
    const auto source = static_cast<std::int64_t>(*held.source);
    arriving_.for_boxes(held.piece, [&](const auto& lengths, const std::vector<BoxPlace>& places) {
      unpacks_[number].push_back({source, tensor, begin + places.back().offset,
                                  places.front().offset, itemsize, lengths, places.back().strides,
                                  places.front().strides});
    });
  }

  // The sums of all terms of a piece, in the order of their numbers.
  void add_sums(const Piece& piece, std::vector<Held> terms, std::vector<ReduceBox>* sums) const {
    std::sort(terms.begin(), terms.end(), [](const Held& left, const Held& right) {
      return left.contribution < right.contribution;
    });
    std::vector<std::int64_t> begins;
    for (const Held& term : terms) begins.push_back(term.source ? first_element(term) : 0);
    const auto tensor = static_cast<std::int64_t>(arriving_.part(piece).tensor);
    const auto num_tensors = static_cast<std::int64_t>(exchange_.itemsizes.size());
    arriving_.for_boxes(piece, [&](const auto& lengths, const std::vector<BoxPlace>& places) {
      ReduceBox box = {tensor, places.front().offset, lengths, places.front().strides, {}};
      for (std::size_t i = 0; i < terms.size(); ++i) {
        if (terms[i].source) {
          box.slots.push_back({num_tensors + static_cast<std::int64_t>(*terms[i].source),
                               begins[i] + places.back().offset, places.back().strides});
        } else if (places.size() == 3) {
          box.slots.push_back({tensor, places[1].offset, places[1].strides});
        } else {
          throw std::invalid_argument("a term of this rank's own in a box of another storage's");
        }
      }
      sums->push_back(std::move(box));
    });
  }

  ArenaRound round(std::size_t number) const {
    ArenaRound made;
    made.pack = copies(packs(number, &made.sends), /*is_past_cache=*/false);
    for (const auto& message : receives_) {
      if (number >= message.rounds.size()) continue;
      std::uint64_t num_bytes = 0;
      for (const Arriving& found : message.rounds[number]) {
        num_bytes += arriving_.num_bytes(found.piece);
      }
      made.receives.push_back({message.peer, 0, num_bytes});
    }
    if (number == 0) made.keep = copies(exchange_.keeps, exchange_.is_past_cache);
    made.unpack = copies(unpacks_[number], exchange_.is_past_cache);
    made.reduces = reduces(number);
    return made;
  }

  // Copies of a round into its slot, equal messages once, and what is sent from there to whom.
  std::vector<CopyBox> packs(std::size_t number, std::vector<SlotMessage>* sends) const {
    std::vector<CopyBox> found;
    std::map<std::vector<Piece>, SlotMessage> placed;
    std::uint64_t filled = 0;
    for (const auto& message : sends_) {
      if (number >= message.rounds.size()) continue;
      const std::vector<Piece>& pieces = message.rounds[number];
      const auto [place, is_new] = placed.try_emplace(pieces, SlotMessage{0, filled, 0});
      SlotMessage& sent = place->second;
      if (is_new) {
        for (const Piece& piece : pieces) {
          add_packs(piece, filled + sent.num_bytes, &found);
          sent.num_bytes += leaving_.num_bytes(piece);
        }
        filled += in_lines(sent.num_bytes);
      }
      sends->push_back({message.peer, sent.offset, sent.num_bytes});
    }
    return found;
  }

  // One table per reduction.
  std::vector<ArenaRound::Run> reduces(std::size_t number) const {
    std::map<BoxReduction, std::vector<ReduceBox>> sums;
    for (const auto& [piece, terms] : terms_[number]) {
      add_sums(piece, terms, &sums[*exchange_.reductions[arriving_.part(piece).tensor]]);
    }
    std::vector<ArenaRound::Run> made;
    for (const auto& [reduction, boxes] : sums) {
      auto table = std::make_shared<const ReduceTable>(boxes, reduction.op, reduction.dtype,
                                                       reduction.divisor);
      made.push_back([table](const Addresses& sources, const Addresses& targets, int num_threads) {
        table->run(sources, targets, num_threads);
      });
    }
    return made;
  }

  const BoxExchange& exchange_;
  const Parts leaving_, arriving_;
  std::vector<MessageRounds<Piece>> sends_;
  std::vector<MessageRounds<Arriving>> receives_;
  std::size_t num_rounds_ = 0;
  std::map<Piece, std::size_t> last_;                      // of each reduced piece, the last round
  std::vector<std::map<Piece, std::vector<Held>>> terms_;  // that are reduced in each round
  std::vector<std::vector<CopyBox>> unpacks_;              // of each round
  std::uint64_t staged_bytes_ = 0;
};

}  // namespace

bool BoxReduction::operator<(const BoxReduction& other) const {
  return std::tie(dtype, op, divisor) < std::tie(other.dtype, other.op, other.divisor);
}

BoxMoves::BoxMoves(const BoxExchange& exchange)
    : ArenaPlan({}), num_tensors_(exchange.itemsizes.size()) {
  tritondt::check(exchange);
  const Compilation compilation(exchange);
  rounds = compilation.rounds();
  staged_bytes_ = compilation.staged_bytes();
}

void BoxMoves::check(const Operands& operands) const {
  if (operands.sources.size() == num_tensors_ && operands.targets.size() == num_tensors_) return;
  throw std::invalid_argument("an exchange of " + std::to_string(num_tensors_) + " tensors of " +
                              std::to_string(operands.sources.size()) + " sources and " +
                              std::to_string(operands.targets.size()) + " targets");
}

}  // namespace tritondt
