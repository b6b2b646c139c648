#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "nccl/api.h"
#include "nccl/calls.h"
#include "nccl/config.h"

namespace tritondt::nccl {

// Owns one ncclComm_t. Made together by its ranks, ended together by `finalize` and `destroy`; the
// destructor aborts what has not been ended.
//
// A communicator is blocking or not, as its configuration says. One that is not may still be at
// work when a call returns, its own making included: `poll` or `wait` tell, and until it is ready
// it takes no other call, and its stream no other work. NCCL starts a thread for each group of a
// nonblocking one.
//
// Any thread may call; NCCL is called by one at a time. `poll` waits for no other thread, and
// `abort` half a second at most: NCCL wants to be left alone while it aborts, but a thread may be
// stuck in a call of a blocking communicator for ever. In a forked child the destructor does
// nothing and everything else throws.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  using Ids = std::vector<ncclUniqueId>;
  using Ptr = std::unique_ptr<Communicator>;
  // Null: that of the parent, or NCCL's defaults.
  using OptionsPtr = const Options*;

  // Collective. Ids are the same on all ranks; more than one, to make a large one faster, need NCCL
  // 2.23. The device is the thread's current one.
  static Ptr init(std::shared_ptr<const Api> api, Ids ids, int num_ranks, int rank,
                  OptionsPtr options);
  // The part of a rank that `grow` adds to a communicator of others; 2.29.
  static Ptr join(std::shared_ptr<const Api> api, const ncclUniqueId& id, int num_ranks, int rank,
                  OptionsPtr options);

  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // All ranks; those of one color become a communicator, by key and then rank. Null for kNoColor.
  Ptr split(int color, int key, OptionsPtr options);
  // All but the excluded ranks; `with_abort` ends what is under way in this one first. 2.27.
  Ptr shrink(std::vector<int> excluded, OptionsPtr options, bool with_abort);
  // All ranks, while others `join`; `id` is for the rank that made it by `grow_id`. 2.29.
  Ptr grow(int num_ranks, const ncclUniqueId* id, OptionsPtr options);
  ncclUniqueId grow_id();

  // Whether it is ready; false too while another thread is in a call. Throws Error for what failed
  // in the background, by this rank or another.
  bool poll();
  // Polls until ready or the time is over: then false.
  bool wait(double timeout_s);

  // Collective; ready again when everybody has come. Not after `revoke`.
  void finalize();
  // Frees it, at once where it is finalized and ready.
  void destroy();
  // Ends whatever is under way and frees it. On its own rank only: all ranks are to call it.
  void abort();
  // Leaves it as it is to the end of the process: nothing is ended, also where this is destructed.
  void leave();
  // Ends what is under way, for a split or shrink, or destroy, to follow; 2.28.
  void revoke();

  // Throws where it has ended, or belongs to the parent of this process.
  void check_usable() const;
  const Library& library() const { return api_->library(); }
  bool is_blocking() const { return is_blocking_; }
  Place place();
  int device();

  // Issues the calls, as one group where there is more than one. All are checked before the first.
  void issue_all(const std::vector<Call>& calls, cudaStream_t stream,
                 const CallConfiguration* configuration);
  // Microseconds that NCCL expects them to take; see Group::simulate_end. Collective, unless
  // estimated_calls leaves none: a group that is simulated stays queued in its communicator, so
  // that is a child, which is aborted. Blocking communicators only: on others NCCL would run them.
  float simulate(const std::vector<Call>& calls, cudaStream_t stream);

  // The sum of terms times a factor, which is read now, or on the device whenever the op is used.
  // It may be destroyed as soon as the last call with it has returned.
  ncclRedOp_t create_pre_mul_sum(void* factor, ncclDataType_t dtype,
                                 ncclScalarResidence_t residence);
  void destroy_op(ncclRedOp_t op);

  // Memory that NCCL may then read and write where it lies; all ranks' buffers of a call, or none.
  std::uintptr_t register_buffer(std::uintptr_t address, std::size_t num_bytes);  // 2.19
  void deregister_buffer(std::uintptr_t handle);
  // Collective. Throws Unsupported where NCCL answers with no window: these ranks have no symmetric
  // memory. 2.27.
  std::uintptr_t register_window(std::uintptr_t address, std::size_t num_bytes, int flags,
                                 double timeout_s);
  void deregister_window(std::uintptr_t window);

  // Where this process has the byte `offset` of a symmetric window, for kernels: of every rank's
  // part, 0 where its memory cannot be loaded from here; and of all parts at once (multimem), which
  // throws Unsupported where the GPUs have no such address. Valid as long as the window. 2.29.
  std::vector<std::uintptr_t> peer_pointers(std::uintptr_t window, std::size_t offset);
  std::uintptr_t multimem_pointer(std::uintptr_t window, std::size_t offset);

  // One-sided, into a window of the peers; 2.29. A put adds one to its peer's signal (`index`,
  // `context`) when its bytes are there; one of no bytes is the signal alone, and needs no window.
  // `wait_signals` makes the stream wait for so many from each.
  struct Put {
    Message message;
    std::size_t target_offset;  // bytes from the beginning of the peer's window
  };
  struct Signal {
    int index;
    int context;
  };
  struct Expected {
    std::int64_t peer;
    int num_signals;
  };
  void put(const std::vector<Put>& puts, std::uintptr_t window, Signal signal, cudaStream_t stream);
  void wait_signals(const std::vector<Expected>& expected, Signal signal, cudaStream_t stream);

 private:
  enum class State { kOpen, kDestroyed, kAborted };
  // NCCL writes here; of a nonblocking parent, some time after the call has returned.
  using Slot = std::shared_ptr<ncclComm_t>;

  // One thread's turn to call NCCL.
  class Turn {
   public:
    explicit Turn(Communicator& communicator) {
      communicator.check_usable();
      lock_ = std::unique_lock<std::mutex>(communicator.turn_);
      communicator.check_usable();
    }

   private:
    std::unique_lock<std::mutex> lock_;
  };

  Communicator(std::shared_ptr<const Api> api, OptionsPtr options,
               std::shared_ptr<Communicator> parent);
  template <typename Make>
  Ptr make_child(OptionsPtr options, const Make& make);

  bool is_forked() const;
  ncclComm_t comm() const;
  ncclConfig_t* config();
  ncclResult_t end_comm();

  // With the turn.
  void made(bool is_done);
  // The calls to simulate; all are checked first.
  std::vector<Call> checked_estimated(const std::vector<Call>& calls);
  float simulate_here(const std::vector<Call>& calls, cudaStream_t stream);
  bool look();
  void require_ready();
  Place known_place();
  void start(const std::vector<Call>& calls, cudaStream_t stream, const ncclCollConfig_t* config);
  template <typename Called, typename... Arguments>
  void call(const Called& function, Arguments... arguments) {
    if (!api_->call(function, arguments...)) is_ready_ = false;
  }

  const std::shared_ptr<const Api> api_;
  const pid_t process_;
  std::atomic<State> state_{State::kOpen};
  std::mutex turn_;  // of all below
  std::optional<CommConfiguration> configuration_;
  const Slot slot_ = std::make_shared<ncclComm_t>(nullptr);
  std::shared_ptr<Communicator> parent_;  // until this one is ready
  bool asks_parent_ = true;               // whether it is not ready before its parent
  std::vector<Slot> children_;            // that NCCL may still write to
  std::list<ncclWindow_t> windows_;       // likewise
  bool is_blocking_ = true;
  bool is_ready_ = false;
  std::optional<Place> place_;
};

}  // namespace tritondt::nccl
