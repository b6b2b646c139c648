#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "boxes/strided_copy.h"
#include "transport/arena_program.h"

namespace tritondt {

// Where a box begins in one storage, and its strides there; in elements.
struct BoxPlace {
  std::int64_t offset;
  std::vector<std::int64_t> strides;
};

// A box that lies as one in several storages, the last of which is the message of a whole part.
struct JointBox {
  std::vector<std::int64_t> lengths;
  std::vector<BoxPlace> places;
};

// A region of a tensor, of `lengths` without the gaps between its intervals, which a message holds
// dense and row-major. Its boxes are in the message's order.
//
// Of a part that is sent, boxes are in [source, message]; of one that arrives, in
// [target, message], or in [target, source, message] where terms of others are reduced with one
// that this rank has itself.
struct BoxPart {
  std::size_t tensor;
  std::vector<std::int64_t> lengths;
  std::vector<JointBox> boxes;
};

// A term of part number `part`, by its number among all terms of the part.
struct BoxTerm {
  std::size_t part;
  std::int64_t contribution;
};

struct BoxReduction {
  std::string dtype;
  std::string op;
  std::int64_t divisor;

  bool operator<(const BoxReduction& other) const;
};

// One rank's side of an exchange of boxes of some tensors among `num_ranks`, in chunks of
// `chunk_bytes` of each message, alike on all ranks.
struct BoxExchange {
  std::size_t num_ranks;
  std::uint64_t chunk_bytes;
  std::vector<std::int64_t> itemsizes;                  // of the tensors
  std::vector<std::optional<BoxReduction>> reductions;  // of the tensors whose terms are reduced
  std::vector<BoxPart> leaving, arriving;
  std::vector<std::pair<std::size_t, std::vector<std::size_t>>> sends;  // by place: parts leaving
  std::vector<std::pair<std::size_t, std::vector<BoxTerm>>> receives;   // by place: parts arriving
  std::vector<BoxTerm> own_terms;                                       // of parts arriving
  std::vector<CopyBox> keeps;                                           // from source to target
  bool is_past_cache;                                                   // what goes to targets
};

// Boxes that go from tensors of some ranks to those of others, and terms that are reduced on
// arrival in the order of their numbers, so that the bits are the same whoever sends first.
//
// A part is cut into pieces by its lengths alone, and the pieces of a message fill its rounds one
// after the other: sender and receiver find the same rounds, and all terms of a reduction the same
// pieces, without a word about either. What several peers receive in a round is packed once. A term
// whose piece comes in a later round from another peer waits in memory of the receiver's own.
class BoxMoves : public ArenaPlan {
 public:
  // Throws std::invalid_argument.
  explicit BoxMoves(const BoxExchange& exchange);

  void check(const Operands& operands) const override;
  // Bytes of the terms that wait for those of later rounds.
  std::uint64_t staged_bytes() const { return staged_bytes_; }

 private:
  std::size_t num_tensors_;
  std::uint64_t staged_bytes_ = 0;
};

}  // namespace tritondt
