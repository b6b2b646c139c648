#pragma once

#include "nccl/api.h"
#include "nccl/calls.h"

namespace tritondt::nccl {

// Calls that start together. NCCL counts groups by thread, so one that is not ended, because of an
// exception on its way, is ended on the way out: NCCL starts nothing of a group with an error in
// it.
class Group {
 public:
  explicit Group(const Api& api);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Starts them; false where NCCL goes on in the background.
  bool end();

  // Starts nothing: what the calls would take, in microseconds, by NCCL's own model. That of the
  // last collective only (of all that NCCL joins with it); -1 where there are only sends and recvs.
  float simulate_end();

 private:
  const Api& api_;
  bool is_open_ = true;
};

// Whether a call is one function of the library, and no group of others.
bool is_one_function(const Api& api, const Call& call);

// Throws for a call that takes no configuration of its own: Unsupported where the library is too
// old, std::invalid_argument for sends and recvs.
void check_takes_configuration(const Api& api, const Call& call);

// Makes a call; all-to-all, gather and scatter by sends and recvs before 2.28. `config` may be
// null. False where NCCL goes on in the background.
bool issue(const Api& api, ncclComm_t comm, Place place, const Call& call, cudaStream_t stream,
           const ncclCollConfig_t* config);

}  // namespace tritondt::nccl
