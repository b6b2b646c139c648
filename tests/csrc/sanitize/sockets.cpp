// Ranks as threads that exchange random messages; interrupts, expiries, peers that leave or
// disagree.
#include <chrono>
#include <random>
#include <thread>

#include "check.h"
#include "cpu/clock.h"
#include "groups.h"

namespace {

using tritondt::Ending;
using tritondt::Outcome;
using tritondt::SocketGroup;

constexpr std::size_t kNumRanks = 3;
constexpr std::uint64_t kNumExchanges = 150;

// What `source` sends to `target` in one exchange, known to both.
std::vector<char> message_content(std::size_t source, std::size_t target, std::uint64_t exchange) {
  std::mt19937_64 random(exchange * 16 + source * 4 + target);
  const std::size_t longest = exchange % 20 == 0 ? 600'000 : 300;
  std::vector<char> content(std::uniform_int_distribution<std::size_t>(0, longest)(random));
  for (char& byte : content) byte = static_cast<char>(random());
  return content;
}

void exchange_all(SocketGroup* group, std::size_t rank) {
  for (std::uint64_t exchange = 1; exchange <= kNumExchanges; ++exchange) {
    std::vector<std::vector<char>> out(kNumRanks), in(kNumRanks);
    std::vector<tritondt::Message> sends, receives;
    for (std::size_t peer = 0; peer < kNumRanks; ++peer) {
      if (peer == rank) continue;
      out[peer] = message_content(rank, peer, exchange);
      in[peer].resize(message_content(peer, rank, exchange).size());
      sends.push_back(message(peer, &out[peer]));
      receives.push_back(message(peer, &in[peer]));
    }
    group->start(sends, receives, exchange);
    CHECK(finish(group).outcome == Outcome::kDone);
    CHECK(group->started_ns() == 0);
    for (std::size_t peer = 0; peer < kNumRanks; ++peer) {
      if (peer != rank) CHECK(in[peer] == message_content(peer, rank, exchange));
    }
  }
}

void check_exchanges() {
  Ranks ranks(kNumRanks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kNumRanks; ++rank) {
    threads.emplace_back([&ranks, rank] { exchange_all(ranks.group(rank).get(), rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

// A rank waits in a thread of its own while `act` does something to it.
template <typename Act>
Ending wait_while(Ranks* ranks, const Act& act) {
  std::vector<char> bytes(100);
  ranks->group(0)->start({}, {message(1, &bytes)}, 5);
  Ending ending = {};
  std::thread waiting([&] { ending = finish(ranks->group(0).get()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  act();
  waiting.join();
  return ending;
}

void check_endings() {
  for (int i = 0; i < 20; ++i) {
    Ranks interrupted(2);
    CHECK(wait_while(&interrupted, [&] { interrupted.group(0)->interrupt(); }).outcome ==
          Outcome::kInterrupted);

    Ranks expired(2);
    SocketGroup* group = expired.group(0).get();
    const Ending ending = wait_while(&expired, [&] {
      CHECK(!group->expire(group->started_ns() - 1));
      CHECK(group->expire(group->started_ns()));
    });
    CHECK(ending.outcome == Outcome::kExpired && ending.peer == 1);
    CHECK(!group->expire(group->started_ns()));
    group->start({}, {}, 6);
    CHECK(group->finish().outcome == Outcome::kExpired);

    Ranks left(2);
    CHECK(wait_while(&left, [&] { left.leave(1); }).outcome == Outcome::kClosed);

    Ranks differing(2);
    std::vector<char> bytes(100);
    const Ending mismatch = wait_while(
        &differing, [&] { differing.group(1)->start({message(0, &bytes)}, {}, /*tag=*/99); });
    CHECK(mismatch.outcome == Outcome::kMismatch && mismatch.peer == 1);
  }
}

// Expiry aims at exchanges that end at the same moment: it meets one that is under way, or none.
void check_expiry_races() {
  for (int i = 0; i < 100; ++i) {
    Ranks ranks(2);
    SocketGroup* group = ranks.group(0).get();
    bool has_expired = false;
    std::thread expiring([&] {
      for (int j = 0; j < 50 && !has_expired; ++j) has_expired = group->expire(group->started_ns());
    });
    std::vector<char> out(10, 'x'), in(10);
    bool was_told = false;
    for (std::uint64_t tag = 1; tag <= 10 && !was_told; ++tag) {
      ranks.group(1)->start({message(0, &out)}, {}, tag);
      group->start({}, {message(1, &in)}, tag);
      was_told = finish(group).outcome == Outcome::kExpired;
    }
    expiring.join();
    CHECK(!was_told || has_expired);
  }
}

}  // namespace

void check_socket_groups() {
  check_exchanges();
  check_endings();
  check_expiry_races();
}
