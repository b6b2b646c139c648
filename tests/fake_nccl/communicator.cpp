#include "communicator.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "errors.h"
#include "memory.h"
#include "settings.h"

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
                                const Stopped& stopped) {
  num_ranks_ = num_ranks;
  rank_ = rank;
  possessions_.num_signals_taken.resize(static_cast<std::size_t>(num_ranks));
  try {
    segment_ = new Segment(id, num_ranks_, rank_);
  } catch (const std::system_error& error) {
    return failed(ncclSystemError, std::string("joining a communicator: ") + error.what());
  } catch (const std::runtime_error& error) {
    return failed(ncclInvalidUsage, std::string("joining a communicator: ") + error.what());
  }
  int lost = -1;
  const bool is_complete = drive(
      [&] {
        if (settings().reports_lost_peers) lost = first_lost(all_ranks());
        if (segment()->is_complete()) return Progress::kDone;
        return Progress::kBlocked;
      },
      [&] { return is_aborted_ || lost >= 0 || stopped(); });
  Segment::close_files_that_are_over();
  if (is_complete) return ncclSuccess;
  if (lost < 0) return failed(ncclInternalError, "joining a communicator: aborted");
  return failed(ncclRemoteError, "joining a communicator: rank " + std::to_string(lost) +
                                     " was lost before all had come");
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

int Communicator::first_lost(const std::vector<int>& peers) const {
  for (const int peer : peers) {
    const RankSlot& slot = segment()->slot(peer);
    const Presence presence = slot.presence;
    if (presence == Presence::kLeft) return peer;
    if (presence == Presence::kThere && !slot.process.is_alive()) return peer;
  }
  return -1;
}

bool Communicator::has_lost_peer(Exchange* exchange) {
  if (!settings().reports_lost_peers) return false;
  const int lost = first_lost(exchange->awaited_peers());
  // It may have done its part, and left, since the exchange looked.
  if (lost < 0 || exchange->advance() != Progress::kBlocked) return false;
  const std::vector<int> awaited = exchange->awaited_peers();
  if (std::count(awaited.begin(), awaited.end(), lost) == 0) return false;
  report(ncclRemoteError, "rank " + std::to_string(lost) + " has left, or its process has ended");
  return true;
}

void Communicator::leave() {
  if (segment() != nullptr) segment()->leave();
}

ncclResult_t Communicator::exchange_values(const std::vector<int>& members, const char* mine,
                                           char* all, std::size_t num_bytes,
                                           const Stopped& stopped) {
  const Tag tag = {Collective::kAgreement, 0, 0, 0};
  Exchange exchange(segment(), Channel::kControl, rank_, num_ranks_);
  for (std::size_t i = 0; i < members.size(); ++i) {
    exchange.send({members[i], tag, const_cast<char*>(mine), num_bytes});
    exchange.receive({members[i], tag, all + i * num_bytes, num_bytes});
  }
  bool is_lost = false;
  const bool is_done = drive(
      [&] {
        const Progress progress = exchange.advance();
        is_lost = progress == Progress::kBlocked && has_lost_peer(&exchange);
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

std::shared_ptr<Latch> Communicator::replace_tail(std::shared_ptr<Latch> tail) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(tail_, tail);
  return tail;
}

}  // namespace fake_nccl
