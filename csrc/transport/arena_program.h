#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace tritondt {

using Addresses = std::vector<std::uintptr_t>;

// A message that lies in the sender's slot: `offset` bytes behind the slot's first one.
struct SlotMessage {
  std::size_t peer;
  std::uint64_t offset;
  std::uint64_t num_bytes;
};

// Where the tensors of one run lie, and memory for what has arrived and waits for a later round,
// which is the last of the targets as well while a program runs.
struct Operands {
  Addresses sources;
  Addresses targets;
  int num_threads = 1;
  std::uintptr_t staging = 0;
};

// One rank's side of an exchange, for all times that it runs: rounds of pack, announce, keep and
// unpack. Two ranks that exchange in a round do so in the round of the same number; otherwise
// ranks may have as many rounds as they need.
class ArenaProgram {
 public:
  virtual ~ArenaProgram() = default;

  virtual std::size_t num_rounds() const = 0;
  // Throws std::invalid_argument where a tensor of the program is not among the operands, before
  // anything of it runs.
  virtual void check(const Operands& operands) const = 0;
  // The messages of a round, put into empty lists; those of peers come without offsets.
  virtual void list(std::size_t round, std::vector<SlotMessage>* sends,
                    std::vector<SlotMessage>* receives) const = 0;
  // From sources into the slot that begins at `slot`.
  virtual void pack(std::size_t round, const Operands& operands, std::uintptr_t slot) const = 0;
  // What stays on this rank, while messages are on their way.
  virtual void keep(std::size_t round, const Operands& operands) const = 0;
  // From messages at `arrived`, by place of the peer, to targets.
  virtual void unpack(std::size_t round, const Operands& operands,
                      const Addresses& arrived) const = 0;
};

// What a round of an exchange of boxes packs, sends and unpacks. Any of its steps may be empty.
struct ArenaRound {
  using Run = std::function<void(const Addresses&, const Addresses&, int num_threads)>;

  std::vector<SlotMessage> sends;
  std::vector<SlotMessage> receives;  // without offsets, which the sender says
  Run pack;                           // from sources to the slot
  Run keep;                           // from sources to targets
  Run unpack;                         // from messages by place of the peer to [targets, staging]
  std::vector<Run> reduces;           // from [sources, messages by place, staging] to targets
};

// An exchange of boxes, by tables.
class ArenaPlan : public ArenaProgram {
 public:
  explicit ArenaPlan(std::vector<ArenaRound> rounds) : rounds(std::move(rounds)) {}

  std::size_t num_rounds() const override { return rounds.size(); }
  void check(const Operands&) const override {}  // tables check what they are run on
  void list(std::size_t round, std::vector<SlotMessage>* sends,
            std::vector<SlotMessage>* receives) const override;
  void pack(std::size_t round, const Operands& operands, std::uintptr_t slot) const override;
  void keep(std::size_t round, const Operands& operands) const override;
  void unpack(std::size_t round, const Operands& operands, const Addresses& arrived) const override;

  std::vector<ArenaRound> rounds;
};

}  // namespace tritondt
