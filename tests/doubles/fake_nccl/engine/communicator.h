#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/config.h"
#include "engine/exchange.h"
#include "engine/stream.h"
#include "engine/task.h"
#include "shared/segment.h"

namespace fake_nccl {

class Registration;
class Window;

// What a user has told a communicator of, under its lock.
struct Possessions {
  std::map<int, Factor> factors;                                 // by the number of the op
  std::map<void*, std::shared_ptr<Registration>> registrations;  // by handle, or window
  std::map<ncclWindow_t, std::shared_ptr<Window>> windows;
  std::vector<std::uint64_t> num_signals_taken;  // by source
  ncclCollConfig_t call_config = {};             // of the last call that had one
  // What simulated groups have left in the queues, by peer.
  std::map<int, std::deque<Message>> simulated_sends;
  std::map<int, std::deque<Message>> simulated_receives;
  int next_op = ncclNumOps;
  bool is_id_unused = false;  // made by ncclCommGetUniqueId
  bool has_failed_to_shrink = false;
};

// One rank of a communicator.
//
// Its state is that of ncclCommGetAsyncError: in progress while something runs in the background,
// and from an error on that error. Two flags stop what waits: revoked ends operations, aborted ends
// everything. Both may be set from any thread, at any time.
class Communicator {
 public:
  Communicator(int device, const Config& config) : device_(device), config_(config) {}
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  int device() const { return device_; }
  const Config& config() const { return config_; }
  Segment* segment() const { return segment_.load(); }

  using Stopped = std::function<bool()>;
  // Which rank of a parent was lost, so that a rank will never come; -1 where none was.
  using LostBefore = std::function<int(int rank)>;

  // Meets all other ranks of `id`, which fails where they have not come in the time they are given.
  ncclResult_t join(const ncclUniqueId& id, int num_ranks, int rank, const Stopped& stopped,
                    const LostBefore& lost_before);
  // Gives every member what each of them has; fails where `stopped` or an abort ends it. Members
  // are ranks, this one among them, and call this in the same order.
  template <typename Value>
  ncclResult_t agree(
      Channel channel, const std::vector<int>& members, const Value& mine, std::vector<Value>* all,
      const Stopped& stopped = [] { return false; }) {
    all->resize(members.size());
    return exchange_values(channel, members, reinterpret_cast<const char*>(&mine),
                           reinterpret_cast<char*>(all->data()), sizeof mine, stopped);
  }
  std::vector<int> all_ranks() const;

  // Calls `advance` until it is done, or `stopped`, and sleeps while it is blocked. False if
  // stopped.
  bool drive(const std::function<Progress()>& advance, const Stopped& stopped);
  // Which rank is the reason that `peer` does nothing more for what `members` do together: itself,
  // if it has left or died, or the member that it has lost and told of; -1 where it goes on.
  int loss_at(int peer, const std::vector<int>& members) const;
  // Whether what `members` do together is blocked for a loss, which is then reported; never where
  // that is not asked for. `awaited` carries on as far as that goes, and returns whom it waits for.
  bool has_lost_peer(const std::vector<int>& members,
                     const std::function<std::vector<int>()>& awaited);
  // Lets peers know that this rank will do nothing more.
  void leave();

  // Success where a call may use the communicator now.
  ncclResult_t ready() const;
  ncclResult_t state() const { return state_; }
  // An error stays; anything else is replaced.
  void set_state(ncclResult_t state);
  void report(ncclResult_t error, const std::string& text);

  bool is_aborted() const { return is_aborted_; }
  bool is_stopped() const { return is_aborted_ || is_revoked_; }
  bool is_revoked() const { return is_revoked_; }
  bool is_finalized() const { return is_finalized_; }
  void finalize() { is_finalized_ = true; }
  void revoke();
  // Returns when nothing of the communicator touches the user's memory any more.
  void abort();

  // What runs, from a thread of a stream or in the background, between begin() and end(). Once
  // begin() is false it must do nothing.
  bool begin();
  void end();
  // What has been issued, from before it is enqueued until it has run or was dropped.
  void issue();
  void retire();
  // Until all that was issued is over; false where an abort came first.
  bool wait_for_issued();
  // Until nothing runs.
  void wait_for_running();
  // An operation that a graph has, and may run again; until all such graphs are destroyed.
  void capture();
  void release_graphs();
  void wait_for_graphs();

  // When the operation issued last is over; operations of a communicator run in order of issue,
  // whatever their streams. Returns what was there before.
  std::shared_ptr<Latch> replace_tail(std::shared_ptr<Latch> tail);

  // Calls use(&possessions) under the lock.
  template <typename Use>
  auto with_possessions(const Use& use) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return use(&possessions_);
  }

 private:
  ncclResult_t exchange_values(Channel channel, const std::vector<int>& members, const char* mine,
                               char* all, std::size_t num_bytes, const Stopped& stopped);
  // Why not all will ever join, or nothing.
  std::string reason_not_to_join(const LostBefore& lost_before) const;
  void wake();

  int num_ranks_ = 0;
  int rank_ = -1;
  const int device_;
  const Config config_;
  std::atomic<Segment*> segment_{nullptr};
  std::atomic<ncclResult_t> state_{ncclSuccess};
  std::atomic<bool> is_aborted_{false};
  std::atomic<bool> is_revoked_{false};
  std::atomic<bool> is_finalized_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  int num_running_ = 0;
  int num_issued_ = 0;
  bool is_in_graph_ = false;
  std::shared_ptr<Latch> tail_;
  Possessions possessions_;
};

}  // namespace fake_nccl
