#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "transport/message.h"
#include "transport/socket_group.h"

namespace tritondt {

using Addresses = std::vector<std::uintptr_t>;

// A message that lies in the sender's slot: `offset` bytes behind the slot's first one.
struct SlotMessage {
  std::size_t peer;
  std::uint64_t offset;
  std::uint64_t num_bytes;
};

// Where the tensors of one run lie, and the buffers of messages that go over sockets.
struct Operands {
  Addresses sources;
  Addresses targets;
  int num_threads = 1;
  std::uintptr_t send_buffer = 0;
  std::uintptr_t receive_buffer = 0;
};

// One rank's side of an exchange, for all times that it runs: rounds of pack, announce, keep and
// unpack. Two ranks that exchange in a round do so in the round of the same number; otherwise
// ranks may have as many rounds as they need.
class DirectProgram {
 public:
  virtual ~DirectProgram() = default;

  virtual std::size_t num_rounds() const = 0;
  // The messages of a round, put into empty lists; those of peers come without offsets.
  virtual void list(std::size_t round, std::vector<SlotMessage>* sends,
                    std::vector<SlotMessage>* receives) const = 0;
  // From sources into the slot that begins at `slot`.
  virtual void pack(std::size_t round, const Operands& operands, std::uintptr_t slot) const = 0;
  // What stays on this rank, while messages are on their way.
  virtual void keep(std::size_t round, const Operands& operands) const = 0;
  // From messages at `arrived`, by place of the peer, behind them the receive buffer, to targets.
  virtual void unpack(std::size_t round, const Operands& operands,
                      const Addresses& arrived) const = 0;

  // Messages of the only round that are too long for a slot, as both sides know by their length.
  virtual bool has_sockets() const { return false; }
  virtual void start_sockets(SocketGroup* /*group*/, const Operands& /*operands*/,
                             std::uint64_t /*tag*/) const {}
};

// An exchange of boxes in one round, by tables.
class DirectPlan : public DirectProgram {
 public:
  using Run = std::function<void(const Addresses&, const Addresses&, int num_threads)>;

  // `pack` runs from sources to the slot and the send buffer; `keep` from sources to targets;
  // `unpack` from [messages by place of the peer, receive buffer] to targets; `reduces` from
  // [sources, messages by place, receive buffer] to targets. Any may be empty.
  DirectPlan(std::vector<SlotMessage> sends, std::vector<SlotMessage> receives,
             MessageSlices socket_sends, MessageSlices socket_receives, bool uses_sockets, Run pack,
             Run keep, Run unpack, std::vector<Run> reduces);

  std::size_t num_rounds() const override { return 1; }
  void list(std::size_t round, std::vector<SlotMessage>* sends,
            std::vector<SlotMessage>* receives) const override;
  void pack(std::size_t round, const Operands& operands, std::uintptr_t slot) const override;
  void keep(std::size_t round, const Operands& operands) const override;
  void unpack(std::size_t round, const Operands& operands, const Addresses& arrived) const override;
  bool has_sockets() const override { return uses_sockets_; }
  void start_sockets(SocketGroup* group, const Operands& operands,
                     std::uint64_t tag) const override;

  std::vector<SlotMessage> sends;
  std::vector<SlotMessage> receives;  // without offsets, which the sender says
  Run run_pack, run_keep, run_unpack;

 private:
  MessageSlices socket_sends_;
  MessageSlices socket_receives_;
  bool uses_sockets_;
  std::vector<Run> reduces_;
};

}  // namespace tritondt
