#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/arena.h"
#include "transport/arena_board.h"
#include "transport/arena_program.h"
#include "transport/socket_group.h"
#include "transport/step_log.h"
#include "transport/timed_exchange.h"

namespace tritondt {

// Ranks of one machine that read messages where their senders have packed them, in arenas that all
// of them have mapped; driven by the thread that calls.
//
// A rank packs into one of its two slots, in turns, announces what lies there and rings the bells
// of those that it is for; once in every round of an exchange.
// Receivers check the announcement against what they expect and unpack from the sender's memory. A
// slot is packed again when all have said that they have read it. What a peer announces is checked
// before it is used: it may come from a rank that does something else, but cannot make this one
// read outside the arena. A message that this rank was sent and does not expect ends the exchange
// in which it is found. That a peer has left is seen at its socket.
//
// One thread at a time calls `run`, `finish` and `skip`; `interrupt` may be called from any thread.
class ArenaGroup : public TimedExchange {
 public:
  // `arenas` and `sockets` by place, equally long arenas; `sockets` are for liveness, -1 where
  // there is none so far. A wait looks `num_spins` times before it sleeps. Throws
  // std::invalid_argument.
  ArenaGroup(std::size_t place, std::vector<std::shared_ptr<Arena>> arenas,
             std::shared_ptr<SocketGroup> group, std::vector<int> sockets, int num_spins);
  ~ArenaGroup() override = default;
  ArenaGroup(const ArenaGroup&) = delete;
  ArenaGroup& operator=(const ArenaGroup&) = delete;

  // The connection to a peer, before the first exchange with it; by the thread that exchanges.
  // Throws std::out_of_range.
  void connect(std::size_t peer, int socket);

  // Bytes of a slot in arenas of `arena_bytes`.
  static std::uint64_t slot_bytes(std::size_t arena_bytes, std::size_t num_ranks);

  // Runs exchange number `sequence`, higher than that of the call before, to its end, or comes back
  // as `finish` does. `program` must live until then, which is what `keep` is for. Throws
  // std::invalid_argument for messages that do not fit, and for tensors that there are not.
  Ending run(const ArenaProgram* program, Operands operands, std::uint64_t sequence,
             std::uint64_t tag);

  // Carries on. Comes back with kPending, and a peer that it waits for, when a fifth of a second
  // passed: call it again. Throws std::invalid_argument where the arenas are released.
  Ending finish();

  // Whether an exchange has begun that has not ended.
  bool is_under_way() const { return step_ != Step::kDone; }

  // Holds on to what the exchange under way needs, in place of what was held before.
  void keep(std::shared_ptr<const void> kept) { kept_ = std::move(kept); }

  // Tells all that this rank reads no message of exchange `sequence`, nor of any before. What is
  // under way ends, and interruptions are forgotten.
  void skip(std::uint64_t sequence);

  // Makes the running exchange, or the next one that has to wait, end with kInterrupted.
  void interrupt();

  // Unmaps all arenas; nothing can run afterwards. Not while an exchange is running.
  void release();

 private:
  enum class Step { kSlot, kArrivals, kDone };

  void begin_round();
  Ending advance();
  Ending await_slot();
  void send();
  Ending await_arrivals();
  Outcome look(const SlotMessage& message);
  std::int64_t unexpected() const;
  void end_round();
  template <typename Look>
  Ending await(Bell& bell, const Look& look);
  template <typename Run>
  auto timed(StepKind kind, const Run& run);
  Ending why_stopped(bool has_rung) const;
  bool has_left(std::size_t peer) const;
  void wake() override;

  const std::size_t place_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<ArenaBoard> boards_;
  const std::shared_ptr<SocketGroup> group_;
  std::vector<int> sockets_;
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

  // By peer: the last message that it was sent, the last that was read of it, and those that were
  // read from either of its announcements. What came up to `skipped_` may stay unread.
  std::vector<std::uint64_t> last_sent_, last_read_, read_at_[2];
  std::uint64_t skipped_ = 0;

  // The exchange under way: its round, and the round's number among all of this group's.
  Step step_ = Step::kDone;
  const ArenaProgram* program_ = nullptr;
  std::shared_ptr<const void> kept_;
  std::size_t round_ = 0;
  std::uint64_t sequence_ = 0, tag_ = 0;
  Operands operands_;
  std::vector<SlotMessage> sends_, receives_;
  Addresses arrived_;
  StepLog& log_ = StepLog::of_process();
  std::vector<std::size_t> pending_;  // peers that are waited for
  std::int64_t slice_end_ns_ = 0;
};

}  // namespace tritondt
