#include "nccl/communicator.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <utility>

#include "cpu/clock.h"
#include "cpu/process.h"

namespace tritondt::nccl {
namespace {

constexpr std::int64_t kAbortPatienceNs = 500'000'000;
// A call that goes on in the background mostly takes tens of microseconds, making a communicator
// seconds.
constexpr std::int64_t kSpinNs = 50'000;
constexpr std::int64_t kPauseNs = 200'000;

void pause_since(std::int64_t start_ns) {
  if (monotonic_ns() - start_ns < kSpinNs) {
    sched_yield();
    return;
  }
  const timespec pause = {0, kPauseNs};
  nanosleep(&pause, nullptr);
}

std::int64_t deadline_after(double timeout_s, std::int64_t start_ns) {
  const double ns = timeout_s * 1e9;
  return ns < 9e18 ? start_ns + static_cast<std::int64_t>(ns) : INT64_MAX;
}

// Of the ranks of a communicator that is to be made.
void check_place(int rank, int num_ranks) {
  if (num_ranks >= 1 && rank >= 0 && rank < num_ranks) return;
  throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(num_ranks) +
                              " was asked for; ranks are counted from 0");
}

}  // namespace

Communicator::Communicator(std::shared_ptr<const Api> api, OptionsPtr options,
                           std::shared_ptr<Communicator> parent)
    : api_(std::move(api)), process_(process_number()), parent_(std::move(parent)) {
  if (options != nullptr) configuration_.emplace(api_->library(), *options);
}

Communicator::~Communicator() {
  if (is_forked() || state_ != State::kOpen) return;
  state_ = State::kAborted;
  const ncclResult_t result = end_comm();
  if (result == ncclSuccess) return;
  std::fprintf(stderr, "tritondt: ncclCommAbort of a communicator that was never closed: %s\n",
               name_of(result));
}

Communicator::Ptr Communicator::init(std::shared_ptr<const Api> api, Ids ids, int num_ranks,
                                     int rank, OptionsPtr options) {
  check_place(rank, num_ranks);
  if (ids.empty()) throw std::invalid_argument("no unique id was given; there must be one or more");
  static const Options kDefaults;
  Ptr made(new Communicator(std::move(api), options != nullptr ? options : &kDefaults, nullptr));
  const Api& nccl = *made->api_;
  ncclComm_t* comm = made->slot_.get();
  made->made(ids.size() == 1 ? nccl.call(nccl.ncclCommInitRankConfig, comm, num_ranks, ids[0], rank,
                                         made->config())
                             : nccl.call(nccl.ncclCommInitRankScalable, comm, num_ranks, rank,
                                         static_cast<int>(ids.size()), ids.data(), made->config()));
  made->place_ = Place{rank, num_ranks};
  return made;
}

Communicator::Ptr Communicator::join(std::shared_ptr<const Api> api, const ncclUniqueId& id,
                                     int num_ranks, int rank, OptionsPtr options) {
  check_place(rank, num_ranks);
  Ptr made(new Communicator(std::move(api), options, nullptr));
  const Api& nccl = *made->api_;
  made->made(nccl.call(nccl.ncclCommGrow, nullptr, num_ranks, &id, rank, made->slot_.get(),
                       made->config()));
  made->place_ = Place{rank, num_ranks};
  return made;
}

template <typename Make>
Communicator::Ptr Communicator::make_child(OptionsPtr options, const Make& make) {
  Ptr child(new Communicator(api_, options, shared_from_this()));
  children_.push_back(child->slot_);
  const bool is_done = make(child->slot_.get(), child->config());
  if (!is_done) is_ready_ = false;
  child->made(is_done);
  return child;
}

Communicator::Ptr Communicator::split(int color, int key, OptionsPtr options) {
  const Turn turn(*this);
  require_ready();
  Ptr child = make_child(options, [&](ncclComm_t* made, ncclConfig_t* config) {
    return api_->call(api_->ncclCommSplit, comm(), color, key, made, config);
  });
  return color == kNoColor ? nullptr : std::move(child);
}

Communicator::Ptr Communicator::shrink(std::vector<int> excluded, OptionsPtr options,
                                       bool with_abort) {
  const Turn turn(*this);
  if (!with_abort) require_ready();
  Ptr child = make_child(options, [&](ncclComm_t* made, ncclConfig_t* config) {
    return api_->call(api_->ncclCommShrink, comm(), excluded.data(),
                      static_cast<int>(excluded.size()), made, config,
                      with_abort ? kShrinkAbort : kShrinkDefault);
  });
  // What made others shrink this one stays with it, and is no error of the child.
  child->asks_parent_ = !with_abort;
  return child;
}

Communicator::Ptr Communicator::grow(int num_ranks, const ncclUniqueId* id, OptionsPtr options) {
  const Turn turn(*this);
  require_ready();
  return make_child(options, [&](ncclComm_t* made, ncclConfig_t* config) {
    return api_->call(api_->ncclCommGrow, comm(), num_ranks, id, -1, made, config);
  });
}

ncclUniqueId Communicator::grow_id() {
  const Turn turn(*this);
  require_ready();
  ncclUniqueId id;
  call(api_->ncclCommGetUniqueId, comm(), &id);
  return id;
}

bool Communicator::poll() {
  check_usable();
  const std::unique_lock<std::mutex> lock(turn_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  check_usable();
  return look();
}

bool Communicator::wait(double timeout_s) {
  const std::int64_t start = monotonic_ns();
  const std::int64_t deadline = deadline_after(timeout_s, start);
  while (!poll()) {
    if (monotonic_ns() >= deadline) return false;
    pause_since(start);
  }
  return true;
}

void Communicator::finalize() {
  const Turn turn(*this);
  require_ready();
  call(api_->ncclCommFinalize, comm());
}

void Communicator::destroy() {
  const Turn turn(*this);
  require_ready();
  const ncclComm_t ended = comm();
  state_ = State::kDestroyed;
  api_->call(api_->ncclCommDestroy, ended);
}

void Communicator::abort() {
  if (is_forked()) check_usable();
  State open = State::kOpen;
  if (!state_.compare_exchange_strong(open, State::kAborted)) return;
  std::unique_lock<std::mutex> lock(turn_, std::try_to_lock);
  for (const std::int64_t start = monotonic_ns();
       !lock.owns_lock() && monotonic_ns() - start < kAbortPatienceNs;) {
    pause_since(start);
    static_cast<void>(lock.try_lock());  // owns_lock() tells
  }
  api_->check(end_comm(), api_->ncclCommAbort.name());
}

void Communicator::leave() {
  State open = State::kOpen;
  state_.compare_exchange_strong(open, State::kAborted);
}

// A child that NCCL has not made yet is left to it: its parent is to be aborted first.
ncclResult_t Communicator::end_comm() {
  const ncclComm_t ended = comm();
  return ended == nullptr ? ncclSuccess : api_->ncclCommAbort(ended);
}

void Communicator::revoke() {
  const Turn turn(*this);
  call(api_->ncclCommRevoke, comm(), kRevokeDefault);
}

Place Communicator::place() {
  const Turn turn(*this);
  return known_place();
}

int Communicator::device() {
  const Turn turn(*this);
  require_ready();
  int device = -1;
  call(api_->ncclCommCuDevice, comm(), &device);
  return device;
}

bool Communicator::is_forked() const { return process_number() != process_; }

void Communicator::check_usable() const {
  if (is_forked()) {
    throw Error("", "this communicator belongs to process " + std::to_string(process_) +
                        "; a forked process makes its own");
  }
  const State state = state_;
  if (state == State::kOpen) return;
  throw Error("", std::string("this communicator was ") +
                      (state == State::kAborted ? "aborted" : "destroyed") +
                      "; nothing more can be done with it");
}

ncclComm_t Communicator::comm() const { return __atomic_load_n(slot_.get(), __ATOMIC_ACQUIRE); }

ncclConfig_t* Communicator::config() { return configuration_ ? configuration_->get() : nullptr; }

void Communicator::made(bool is_done) {
  is_blocking_ = is_done;
  is_ready_ = is_done;
  if (is_done) parent_.reset();
}

bool Communicator::look() {
  if (comm() == nullptr) {
    const bool is_parent_ready = parent_ != nullptr && asks_parent_ && parent_->poll();
    if (comm() != nullptr || !is_parent_ready) return false;
    throw Error("", "NCCL made no communicator of its parent, and named no error");
  }
  ncclResult_t state = ncclSuccess;
  api_->call(api_->ncclCommGetAsyncError, comm(), &state);
  api_->check(state, api_->ncclCommGetAsyncError.name());
  is_ready_ = state == ncclSuccess;
  if (is_ready_) {
    children_.clear();
    parent_.reset();
  }
  return is_ready_;
}

void Communicator::require_ready() {
  if (is_ready_ || look()) return;
  throw Error("",
              "this nonblocking communicator is still at work on what was asked of it before; "
              "wait for it first");
}

Place Communicator::known_place() {
  require_ready();
  if (!place_) {
    Place place = {};
    call(api_->ncclCommUserRank, comm(), &place.rank);
    call(api_->ncclCommCount, comm(), &place.num_ranks);
    place_ = place;
  }
  return *place_;
}

}  // namespace tritondt::nccl
