// Ranks as threads that read random messages in each other's arenas, with delays; interrupts,
// expiries, peers that leave, skip, disagree or announce nonsense.
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "groups.h"
#include "transport/arena_group.h"
#include "transport/box_moves.h"
#include "transport/byte_moves.h"
#include "transport/reductions.h"

namespace {

using tritondt::Addresses;
using tritondt::Arena;
using tritondt::ArenaGroup;
using tritondt::ArenaPlan;
using tritondt::ArenaProgram;
using tritondt::ArenaRound;
using tritondt::ByteMoves;
using tritondt::Ending;
using tritondt::Outcome;

constexpr std::size_t kNumRanks = 3;
constexpr std::size_t kArenaBytes = 1 << 16;
constexpr std::uint64_t kNumExchanges = 300;
constexpr std::uint64_t kMaxBytes = 4096;

// Ranks of one process, which share the mapping of each arena as processes share its memory.
class SharedMemoryRanks {
 public:
  explicit SharedMemoryRanks(std::size_t count) : ranks_(count) {
    for (std::size_t rank = 0; rank < count; ++rank) {
      arenas_.push_back(std::make_shared<Arena>(kArenaBytes));
    }
    for (std::size_t rank = 0; rank < count; ++rank) {
      groups_.push_back(std::make_shared<ArenaGroup>(rank, arenas_, ranks_.group(rank),
                                                     ranks_.sockets(rank), rank == 0 ? 100 : 0));
    }
  }
  ArenaGroup* group(std::size_t rank) { return groups_[rank].get(); }
  char* arena(std::size_t rank) { return arenas_[rank]->base(); }
  void leave(std::size_t rank) { ranks_.leave(rank); }

 private:
  Ranks ranks_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<std::shared_ptr<ArenaGroup>> groups_;
};

Ending complete(ArenaGroup* group, Ending ending) {
  while (ending.outcome == Outcome::kPending) ending = group->finish();
  return ending;
}

ArenaPlan empty_plan() { return ArenaPlan({ArenaRound{}}); }

// Bytes that `source` sends to `target` in one exchange, known to both; 0 for no message.
std::uint64_t message_bytes(std::size_t source, std::size_t target, std::uint64_t exchange) {
  std::mt19937_64 random(exchange * 16 + source * 4 + target);
  return random() % 4 == 0 ? 0 : random() % kMaxBytes + 1;
}

char message_byte(std::size_t source, std::size_t target, std::uint64_t exchange) {
  return static_cast<char>(exchange * 7 + source * 3 + target);
}

// The messages of a rank in one exchange, and their checking where they are read.
ArenaPlan random_plan(std::size_t rank, std::uint64_t exchange) {
  ArenaPlan plan = empty_plan();
  for (std::size_t peer = 0; peer < kNumRanks; ++peer) {
    if (peer == rank) continue;
    const std::uint64_t leaving = message_bytes(rank, peer, exchange);
    if (leaving > 0) plan.rounds[0].sends.push_back({peer, peer * kMaxBytes, leaving});
    const std::uint64_t coming = message_bytes(peer, rank, exchange);
    if (coming > 0) plan.rounds[0].receives.push_back({peer, 0, coming});
  }
  const auto dawdle = [rank, exchange] {
    std::mt19937_64 random(exchange * 31 + rank);
    if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
  };
  plan.rounds[0].pack = [sends = plan.rounds[0].sends, rank, exchange, dawdle](
                            const Addresses&, const Addresses& targets, int) {
    dawdle();
    for (const tritondt::SlotMessage& message : sends) {
      std::memset(reinterpret_cast<char*>(targets[0]) + message.offset,
                  message_byte(rank, message.peer, exchange), message.num_bytes);
    }
  };
  plan.rounds[0].unpack = [receives = plan.rounds[0].receives, rank, exchange, dawdle](
                              const Addresses& sources, const Addresses&, int) {
    dawdle();
    for (const tritondt::SlotMessage& message : receives) {
      const char* bytes = reinterpret_cast<const char*>(sources[message.peer]);
      for (std::uint64_t i = 0; i < message.num_bytes; ++i) {
        CHECK(bytes[i] == message_byte(message.peer, rank, exchange));
      }
    }
  };
  return plan;
}

void exchange_all(ArenaGroup* group, std::size_t rank) {
  for (std::uint64_t exchange = 1; exchange <= kNumExchanges; ++exchange) {
    const ArenaPlan plan = random_plan(rank, exchange);
    const Ending ending = complete(group, group->run(&plan, {}, exchange, exchange * 5));
    CHECK(ending.outcome == Outcome::kDone);
    CHECK(group->started_ns() == 0);
  }
}

void check_exchanges() {
  SharedMemoryRanks ranks(kNumRanks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kNumRanks; ++rank) {
    threads.emplace_back([&ranks, rank] { exchange_all(ranks.group(rank), rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Messages of random lengths between all pairs, in rounds of one line each, so that ranks have
// different numbers of rounds; then sums in pieces and in one shot, of several rounds too.
void move_bytes(ArenaGroup* group, std::size_t rank, std::uint64_t exchange) {
  std::vector<char> source(kNumRanks * kMaxBytes), target(kNumRanks * kMaxBytes);
  std::vector<ByteMoves::PeerSpan> sends, receives;
  for (std::size_t peer = 0; peer < kNumRanks; ++peer) {
    if (peer == rank) continue;
    const std::uint64_t leaving = message_bytes(rank, peer, exchange) / 8;
    std::memset(source.data() + peer * kMaxBytes, message_byte(rank, peer, exchange), leaving);
    if (leaving > 0) sends.push_back({peer, {0, peer * kMaxBytes, leaving}});
    const std::uint64_t coming = message_bytes(peer, rank, exchange) / 8;
    if (coming > 0) receives.push_back({peer, {0, peer * kMaxBytes, coming}});
  }
  const ByteMoves program(64, sends, receives, {}, exchange % 2 == 1);
  const Ending ending =
      complete(group, group->run(&program,
                                 {{reinterpret_cast<std::uintptr_t>(source.data())},
                                  {reinterpret_cast<std::uintptr_t>(target.data())}},
                                 exchange, exchange * 5));
  CHECK(ending.outcome == Outcome::kDone);
  for (const auto& [peer, span] : receives) {
    for (std::uint64_t i = 0; i < span.num_bytes; ++i) {
      CHECK(target[span.start + i] == message_byte(peer, rank, exchange));
    }
  }
}

void sum_up(ArenaGroup* group, std::size_t rank, std::uint64_t exchange) {
  std::vector<float> terms(kNumRanks * 40);
  for (std::size_t i = 0; i < terms.size(); ++i) {
    terms[i] = static_cast<float>(rank * 100 + i + exchange);
  }
  const tritondt::Reducer reducer = {
      tritondt::find_reduce_kernel("float32", "sum", 1), 1, {0, 1, 2}, rank, 64};
  std::vector<tritondt::Span> pieces;
  for (std::size_t peer = 0; peer < kNumRanks; ++peer) pieces.push_back({0, peer * 160, 160});
  const std::uint64_t num_bytes = terms.size() * sizeof(float);
  std::unique_ptr<ArenaProgram> program;
  if (exchange % 3 == 1) {
    program =
        std::make_unique<tritondt::PiecewiseReduction>(reducer, pieces, pieces, exchange % 2 == 1);
  } else {
    program = std::make_unique<tritondt::OneShotReduction>(reducer, tritondt::Span{0, 0, num_bytes},
                                                           tritondt::Span{0, 0, num_bytes}, -1);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(terms.data());
  const Ending ending =
      complete(group, group->run(program.get(), {{address}, {address}}, exchange, exchange * 5));
  CHECK(ending.outcome == Outcome::kDone);
  for (std::size_t i = 0; i < terms.size(); ++i) {
    CHECK(terms[i] == static_cast<float>(300 + 3 * (i + exchange)));
  }
}

// Rows of all ranks, which lie column by column, to everybody, and sums of terms of everybody, in
// rounds of a line each; terms wait where one rank sends no rows.
void move_boxes(ArenaGroup* group, std::size_t rank, std::uint64_t exchange) {
  constexpr std::int64_t kNumColumns = 10, kNumRows = 2 * kNumRanks, kNumTerms = 40;
  const std::size_t silent = exchange % (kNumRanks + 1);  // none where there is no such rank
  tritondt::BoxExchange boxes = {kNumRanks, 64, {8, 4}, {std::nullopt}, {}, {}, {}, {}, {}, {}, {}};
  boxes.reductions.emplace_back(tritondt::BoxReduction{"float32", "sum", 1});
  const auto rows_of = [](std::size_t place) -> tritondt::BoxPart {
    const auto first = static_cast<std::int64_t>(2 * place);
    return {0, {2, kNumColumns}, {{{2, kNumColumns}, {{first, {1, kNumRows}}, {0, {10, 1}}}}}};
  };
  const tritondt::BoxPlace whole = {0, {1}};
  boxes.leaving = {rows_of(rank), {1, {kNumTerms}, {{{kNumTerms}, {whole, whole}}}}};
  boxes.arriving = {{1, {kNumTerms}, {{{kNumTerms}, {whole, whole, whole}}}}};
  boxes.own_terms = {{0, static_cast<std::int64_t>(rank)}};
  for (std::size_t peer = 0; peer < kNumRanks; ++peer) {
    boxes.arriving.push_back(rows_of(peer));
    if (peer == rank) continue;
    std::vector<std::size_t> sent = {0, 1};
    std::vector<tritondt::BoxTerm> received = {{peer + 1, 0}, {0, static_cast<std::int64_t>(peer)}};
    if (rank == silent) sent.erase(sent.begin());
    if (peer == silent) received.erase(received.begin());
    boxes.sends.emplace_back(peer, sent);
    boxes.receives.emplace_back(peer, received);
  }
  const tritondt::BoxMoves program(boxes);
  std::vector<std::int64_t> rows(kNumRows * kNumColumns), found(rows.size(), -1);
  std::vector<float> terms(kNumTerms), sums(kNumTerms);
  std::vector<char> staging(program.staged_bytes() + 1);
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<std::int64_t>(i + rank * 1000);
  for (std::size_t i = 0; i < terms.size(); ++i) terms[i] = static_cast<float>(i * 2 + rank);
  const auto at = [](auto& held) { return reinterpret_cast<std::uintptr_t>(held.data()); };
  const Ending ending = complete(
      group, group->run(&program, {{at(rows), at(terms)}, {at(found), at(sums)}, 1, at(staging)},
                        exchange, exchange * 5));
  CHECK(ending.outcome == Outcome::kDone);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t owner = i % kNumRows / 2;
    const bool has_come = owner != rank && owner != silent;
    CHECK(found[i] == (has_come ? static_cast<std::int64_t>(i + owner * 1000) : -1));
  }
  for (std::size_t i = 0; i < sums.size(); ++i) CHECK(sums[i] == static_cast<float>(i * 6 + 3));
}

void check_rounds() {
  SharedMemoryRanks ranks(kNumRanks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kNumRanks; ++rank) {
    threads.emplace_back([&ranks, rank] {
      for (std::uint64_t exchange = 1; exchange <= kNumExchanges; ++exchange) {
        const auto run = exchange % 4 == 0 ? move_boxes : exchange % 3 == 0 ? move_bytes : sum_up;
        run(ranks.group(rank), rank, exchange);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

ArenaPlan sending(std::uint64_t num_bytes) {
  ArenaPlan plan = empty_plan();
  plan.rounds[0].sends.push_back({0, 0, num_bytes});
  return plan;
}

ArenaPlan receiving(std::uint64_t num_bytes) {
  ArenaPlan plan = empty_plan();
  plan.rounds[0].receives.push_back({1, 0, num_bytes});
  return plan;
}

// Rank 0 waits in a thread of its own for rank 1 in exchange 1 while `act` does something to it.
template <typename Act>
Ending wait_while(SharedMemoryRanks* ranks, const Act& act) {
  const ArenaPlan plan = receiving(100);
  Ending ending = {};
  std::thread waiting([&] {
    ArenaGroup* group = ranks->group(0);
    ending = complete(group, group->run(&plan, {}, 1, 5));
  });
  while (ranks->group(0)->started_ns() == 0) std::this_thread::yield();
  act();
  waiting.join();
  return ending;
}

void check_endings() {
  for (int i = 0; i < 5; ++i) {
    SharedMemoryRanks interrupted(2);
    CHECK(wait_while(&interrupted, [&] { interrupted.group(0)->interrupt(); }).outcome ==
          Outcome::kInterrupted);

    SharedMemoryRanks expired(2);
    ArenaGroup* group = expired.group(0);
    const Ending ending = wait_while(&expired, [&] { CHECK(group->expire(group->started_ns())); });
    CHECK(ending.outcome == Outcome::kExpired && ending.peer == 1);
    const ArenaPlan nothing = empty_plan();
    CHECK(group->run(&nothing, {}, 2, 6).outcome == Outcome::kExpired);

    SharedMemoryRanks nested(2);
    ArenaPlan outer = empty_plan();
    bool is_refused = false;
    outer.rounds[0].pack = [&](const Addresses&, const Addresses&, int) {
      try {
        nested.group(0)->run(&nothing, {}, 2, 6);
      } catch (const std::invalid_argument&) {
        is_refused = true;
      }
    };
    CHECK(nested.group(0)->run(&outer, {}, 1, 5).outcome == Outcome::kDone && is_refused);

    SharedMemoryRanks left(2);
    CHECK(wait_while(&left, [&] { left.leave(1); }).outcome == Outcome::kClosed);
  }
}

// What rank 1 runs while rank 0 waits for 100 bytes with tag 5 in exchange 1.
void check_disagreements() {
  const auto run_other = [](std::uint64_t num_bytes, std::uint64_t sequence, std::uint64_t tag) {
    SharedMemoryRanks ranks(2);
    const ArenaPlan plan = sending(num_bytes);
    return wait_while(&ranks, [&] {
      CHECK(ranks.group(1)->run(&plan, {}, sequence, tag).outcome == Outcome::kDone);
    });
  };
  CHECK(run_other(100, 1, 5).outcome == Outcome::kDone);
  CHECK(run_other(101, 1, 5).outcome == Outcome::kMismatch);
  CHECK(run_other(100, 1, 6).outcome == Outcome::kMismatch);
  CHECK(run_other(100, 2, 5).outcome == Outcome::kMismatch);
  CHECK(run_other(100, 3, 5).outcome == Outcome::kMismatch);
}

// Whatever lies on the board of a rank, nobody reads outside its arena.
void check_nonsense() {
  for (const std::uint64_t offset :
       {std::uint64_t{0}, std::uint64_t{kArenaBytes}, std::uint64_t{kArenaBytes - 64},
        std::uint64_t{4097}, std::numeric_limits<std::uint64_t>::max() - 63}) {
    SharedMemoryRanks ranks(2);
    const Ending ending = wait_while(&ranks, [&] {
      const tritondt::ArenaBoard board(ranks.arena(1), 2);
      tritondt::Announcement& announcement =
          board.announcement(tritondt::parity_of(tritondt::first_round_of(1)), 0);
      announcement.tag.store(5);
      announcement.offset.store(offset);
      announcement.num_bytes.store(100);
      announcement.sequence.store(tritondt::first_round_of(1));
    });
    CHECK(ending.outcome == Outcome::kMismatch);
  }
}

// A slot that a peer has not read is not written again, unless the peer says that it never will.
void check_slots() {
  SharedMemoryRanks ranks(2);
  const ArenaPlan plan = sending(100);
  ArenaGroup* const sender = ranks.group(1);
  CHECK(sender->run(&plan, {}, 1, 5).outcome == Outcome::kDone);
  CHECK(sender->run(&plan, {}, 2, 5).outcome == Outcome::kDone);
  CHECK(sender->run(&plan, {}, 3, 5).outcome == Outcome::kPending);
  std::thread skipping([&] { ranks.group(0)->skip(1); });
  CHECK(complete(sender, sender->finish()).outcome == Outcome::kDone);
  skipping.join();
}

// Of two peers that a rank waits for, the last one wakes it.
void check_bells() {
  SharedMemoryRanks ranks(3);
  ArenaPlan both = receiving(100);
  both.rounds[0].receives.push_back({2, 0, 100});
  const ArenaPlan plan = sending(100);
  Ending ending = {};
  std::thread waiting([&] {
    ArenaGroup* const group = ranks.group(0);
    ending = complete(group, group->run(&both, {}, 1, 5));
  });
  tritondt::Bell& bell = tritondt::ArenaBoard(ranks.arena(0), 3).arrivals();
  while (bell.wanted.load() == 0) std::this_thread::yield();
  CHECK(bell.wanted.load() == 2);
  CHECK(ranks.group(1)->run(&plan, {}, 1, 5).outcome == Outcome::kDone);
  CHECK(bell.rings.load() == 1 && bell.wanted.load() == 2);
  CHECK(ranks.group(2)->run(&plan, {}, 1, 5).outcome == Outcome::kDone);
  waiting.join();
  CHECK(ending.outcome == Outcome::kDone);
  CHECK(bell.rings.load() == 2 && bell.wanted.load() == 0);

  SharedMemoryRanks interrupted(2);
  interrupted.group(0)->interrupt();
  CHECK(tritondt::ArenaBoard(interrupted.arena(0), 2).arrivals().rings.load() == 1);
}

}  // namespace

void check_arena_groups() {
  check_bells();
  check_exchanges();
  check_rounds();
  check_endings();
  check_disagreements();
  check_nonsense();
  check_slots();
}
