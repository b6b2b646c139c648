#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/arena.h"
#include "transport/direct_board.h"
#include "transport/message.h"
#include "transport/socket_group.h"
#include "transport/timed_exchange.h"

namespace tritondt {

// A message that lies in the sender's slot: `offset` bytes behind the slot's first one.
struct SlotMessage {
  std::size_t peer;
  std::uint64_t offset;
  std::uint64_t num_bytes;
};

// One rank's side of an exchange, for all times that it runs. Messages of a peer that are too long
// for a slot go over sockets, as both sides know by their length alone.
struct DirectPlan {
  using Run = std::function<void(const std::vector<std::uintptr_t>&,
                                 const std::vector<std::uintptr_t>&, int num_threads)>;

  std::vector<SlotMessage> sends;
  std::vector<SlotMessage> receives;  // without offsets, which the sender says
  MessageSlices socket_sends;
  MessageSlices socket_receives;
  bool has_sockets;
  // From sources to the slot and the sockets' send buffer; from sources to targets; and from
  // [messages by place of the peer, the sockets' receive buffer] to targets. Any may be empty.
  Run pack, keep, unpack;
  std::vector<Run> reduces;  // from [sources, messages by place, receive buffer] to targets
};

// Ranks of one machine that read messages where their senders have packed them, in arenas that all
// of them have mapped; driven by the thread that calls.
//
// A rank packs into one of its two slots, in turns, announces what lies there and rings the bells
// of those that it is for.
// Receivers check the announcement against what they expect and unpack from the sender's memory. A
// slot is packed again when all have said that they have read it. What a peer announces is checked
// before it is used: it may come from a rank that does something else, but cannot make this one
// read outside the arena. That a peer has left is seen at its socket.
//
// One thread at a time calls `run`, `finish` and `skip`; `interrupt` may be called from any thread.
class DirectGroup : public TimedExchange {
 public:
  // `arenas` and `sockets` by place, equally long arenas; `sockets` are for liveness, -1 for none.
  // A wait looks `num_spins` times before it sleeps. Throws std::invalid_argument.
  DirectGroup(std::size_t place, std::vector<std::shared_ptr<Arena>> arenas,
              std::shared_ptr<SocketGroup> group, std::vector<int> sockets, int num_spins);
  ~DirectGroup() override = default;
  DirectGroup(const DirectGroup&) = delete;
  DirectGroup& operator=(const DirectGroup&) = delete;

  // Bytes of a slot in arenas of `arena_bytes`.
  static std::uint64_t slot_bytes(std::size_t arena_bytes, std::size_t num_ranks);

  // Runs exchange number `sequence`, higher than that of the call before, to its end, or comes back
  // as `finish` does. `plan` must live until then. `send_buffer` and `receive_buffer` are those of
  // messages over sockets. Throws std::invalid_argument for a plan that does not fit.
  Ending run(const DirectPlan* plan, std::vector<std::uintptr_t> sources,
             std::vector<std::uintptr_t> targets, int num_threads, std::uint64_t sequence,
             std::uint64_t tag, std::uintptr_t send_buffer, std::uintptr_t receive_buffer);

  // Carries on. Comes back with kPending, and a peer that it waits for, when a fifth of a second
  // passed: call it again.
  Ending finish();

  // Tells all that this rank reads no message of exchange `sequence`, nor of any before.
  void skip(std::uint64_t sequence);

  // Makes the running exchange, or the next one that has to wait, end with kInterrupted.
  void interrupt();

  // Unmaps all arenas; nothing can run afterwards. Not while an exchange is running.
  void release();

 private:
  enum class Step { kSlot, kArrivals, kSockets, kDone };

  void check(const DirectPlan& plan) const;
  Ending advance();
  Ending await_slot();
  void send();
  Ending await_arrivals();
  Outcome look(const SlotMessage& message);
  Ending finish_sockets();
  void unpack();
  template <typename Look>
  Ending await(Bell& bell, const Look& look);
  Ending why_stopped(bool has_rung) const;
  bool has_left(std::size_t peer) const;
  void wake() override;

  const std::size_t place_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<DirectBoard> boards_;
  const std::shared_ptr<SocketGroup> group_;
  const std::vector<int> sockets_;
  const int num_spins_;
  const std::size_t board_bytes_;
  const std::uint64_t slot_bytes_;
  std::atomic<bool> is_interrupted_{false};
  std::mutex releasing_;  // between a thread that wakes this rank and the end of its arenas

  // Peers that read a slot, and the exchange for which they do.
  struct Readers {
    std::uint64_t sequence = 0;
    std::vector<std::size_t> peers;
  };
  Readers readers_[2];

  // The exchange under way.
  Step step_ = Step::kDone;
  const DirectPlan* plan_ = nullptr;
  std::vector<std::uintptr_t> sources_, targets_, arrived_;
  std::vector<std::size_t> pending_;  // peers that are waited for
  int num_threads_ = 1;
  std::uint64_t sequence_ = 0, tag_ = 0;
  std::uintptr_t send_buffer_ = 0, receive_buffer_ = 0;
  std::int64_t slice_end_ns_ = 0;
};

}  // namespace tritondt
