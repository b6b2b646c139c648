#include "engine/communicator.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/memory.h"
#include "settings/errors.h"
#include "settings/settings.h"

namespace fake_nccl {
namespace {

// How long a waiting rank sleeps at most before it looks whether it was stopped or a peer has died.
constexpr int kPatienceMs = 20;

}  // namespace

Communicator::~Communicator() { delete segment_.load(); }

std::vector<int> Communicator::all_ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks_; ++rank) ranks.push_back(rank);
  return ranks;
}

ncclResult_t Communicator::join(const ncclUniqueId& id, int num_ranks, int rank,
                                const Stopped& stopped, const LostBefore& lost_before) {
  num_ranks_ = num_ranks;
  rank_ = rank;
  possessions_.num_signals_taken.resize(static_cast<std::size_t>(num_ranks));
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(settings().join_ms);
  try {
    segment_ = new Segment(id, num_ranks_, rank_);
  } catch (const std::system_error& error) {
    return failed(ncclSystemError, std::string("joining a communicator: ") + error.what());
  } catch (const GivenUp& error) {
    return failed(ncclRemoteError, std::string("joining a communicator: ") + error.what());
  } catch (const std::runtime_error& error) {
    return failed(ncclInvalidUsage, std::string("joining a communicator: ") + error.what());
  }
  std::string reason;
  const bool is_complete = drive(
      [&] {
        // Looked at first: who is lost does not join afterwards.
        if (settings().reports_lost_peers) reason = reason_not_to_join(lost_before);
        if (reason.empty() && std::chrono::steady_clock::now() > deadline) {
          reason = "not all ranks came within " + std::to_string(settings().join_ms) + " ms";
        }
        return segment()->is_complete() ? Progress::kDone : Progress::kBlocked;
      },
      [&] { return is_aborted_ || !reason.empty() || stopped(); });
  Segment::close_files_that_are_over();
  if (is_complete) return ncclSuccess;
  if (reason.empty()) return failed(ncclInternalError, "joining a communicator: aborted");
  // The last one may have come since; then all go on, and hear of the loss when they wait for it.
  if (!segment()->give_up()) return ncclSuccess;
  return failed(ncclRemoteError, "joining a communicator: " + reason);
}

std::string Communicator::reason_not_to_join(const LostBefore& lost_before) const {
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const RankSlot& slot = segment()->slot(peer);
    if (slot.is_gone()) return "rank " + std::to_string(peer) + " was lost before all had come";
    if (!slot.is_awaited()) continue;
    const int lost = lost_before(peer);
    // It may have come, and left the parent, since.
    if (lost < 0 || !slot.is_awaited()) continue;
    return "rank " + std::to_string(lost) + " of the parent was lost before all had come";
  }
  return {};
}

bool Communicator::drive(const std::function<Progress()>& advance, const Stopped& stopped) {
  Doorbell& doorbell = segment()->slot(rank_).doorbell;
  while (!stopped()) {
    const std::uint32_t seen = doorbell.rings();
    const Progress progress = advance();
    if (progress == Progress::kDone) return true;
    if (progress == Progress::kBlocked) doorbell.wait(seen, kPatienceMs);
  }
  return false;
}

int Communicator::loss_at(int peer, const std::vector<int>& members) const {
  const RankSlot& slot = segment()->slot(peer);
  const int told = slot.lost - 1;
  if (std::count(members.begin(), members.end(), told) > 0) return told;
  return slot.is_gone() ? peer : -1;
}

bool Communicator::has_lost_peer(const std::vector<int>& members,
                                 const std::function<std::vector<int>()>& awaited) {
  if (!settings().reports_lost_peers) return false;
  for (const int peer : awaited()) {
    const int lost = loss_at(peer, members);
    if (lost < 0) continue;
    // It may have done its part before.
    const std::vector<int> still = awaited();
    if (std::count(still.begin(), still.end(), peer) == 0) continue;
    report(ncclRemoteError, "rank " + std::to_string(lost) + " has left, or its process has ended");
    // Who waits for this rank alone would wait for ever.
    segment()->slot(rank_).lost = lost + 1;
    segment()->ring_all();
    return true;
  }
  return false;
}

void Communicator::leave() {
  if (segment() != nullptr) segment()->leave();
}

ncclResult_t Communicator::exchange_values(Channel channel, const std::vector<int>& members,
                                           const char* mine, char* all, std::size_t num_bytes,
                                           const Stopped& stopped) {
  const Tag tag = {Collective::kAgreement, 0, 0, 0};
  Exchange exchange(segment(), channel, rank_, num_ranks_);
  for (std::size_t i = 0; i < members.size(); ++i) {
    exchange.send({members[i], tag, const_cast<char*>(mine), num_bytes});
    exchange.receive({members[i], tag, all + i * num_bytes, num_bytes});
  }
  bool is_lost = false;
  const bool is_done = drive(
      [&] {
        const Progress progress = exchange.advance();
        is_lost = progress == Progress::kBlocked &&
                  has_lost_peer(members, [&] { return exchange.advance_and_await(); });
        return progress;
      },
      [&] { return is_aborted_ || is_lost || stopped(); });
  if (is_done) return ncclSuccess;
  return is_lost ? ncclRemoteError
                 : failed(ncclInternalError, "an agreement among ranks was aborted");
}

ncclResult_t Communicator::ready() const {
  if (state_ == ncclInProgress) {
    return failed(ncclInvalidArgument,
                  "a call before the one before it was over: ncclCommGetAsyncError says "
                  "ncclInProgress");
  }
  if (is_finalized_) return failed(ncclInvalidUsage, "the communicator is finalized");
  return state_;
}

void Communicator::set_state(ncclResult_t state) {
  ncclResult_t before = state_;
  while ((before == ncclSuccess || before == ncclInProgress) &&
         !state_.compare_exchange_weak(before, state)) {
  }
}

void Communicator::report(ncclResult_t error, const std::string& text) {
  failed(error, text);
  set_state(error);
}

void Communicator::wake() {
  if (segment() != nullptr) segment()->slot(rank_).doorbell.ring();
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void Communicator::revoke() {
  is_revoked_ = true;
  wake();
}

void Communicator::abort() {
  is_aborted_ = true;
  wake();
  wait_for_running();
}

bool Communicator::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_running_;
  return !is_aborted_;
}

void Communicator::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --num_running_;
  changed_.notify_all();
}

void Communicator::issue() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_issued_;
}

void Communicator::retire() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --num_issued_;
  changed_.notify_all();
}

bool Communicator::wait_for_issued() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return num_issued_ == 0 || is_aborted_; });
  return !is_aborted_;
}

void Communicator::wait_for_running() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return num_running_ == 0; });
}

void Communicator::capture() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_in_graph_ = true;
}

void Communicator::release_graphs() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_in_graph_ = false;
  changed_.notify_all();
}

// As NCCL does (localPersistentRefs, init.cc of 2.30.7), an abort too.
void Communicator::wait_for_graphs() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !is_in_graph_; });
}

std::shared_ptr<Latch> Communicator::replace_tail(std::shared_ptr<Latch> tail) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(tail_, tail);
  return tail;
}

}  // namespace fake_nccl
