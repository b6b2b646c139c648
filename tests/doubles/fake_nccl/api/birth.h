#pragma once

#include <functional>
#include <memory>

#include "engine/communicator.h"
#include "settings/settings.h"

namespace fake_nccl {

// A communicator on its way to the caller, who may have to wait for it. One that has a parent is
// handed out when it has met its other ranks, until when the parent is in progress; any other at
// once, in progress itself.
class Birth {
 public:
  Birth(Function function, const Config& base, int device)
      : function_(function), fate_(fate_of(function)), config_(base), device_(device) {}

  // What the caller is told where nothing is to happen.
  ncclResult_t refusal(const ncclComm_t* made, const ncclConfig_t* config);

  // Submits `work(communicator)`; one that has no ranks afterwards is not handed out.
  ncclResult_t submit(ncclComm_t* made, const std::shared_ptr<Communicator>& parent,
                      const std::function<ncclResult_t(Communicator*)>& work) const;

 private:
  Function function_;
  Fate fate_;
  Config config_;
  int device_;
};

// Makes one of `num_ranks` ranks that meet by an id.
ncclResult_t create(Function function, ncclComm_t* made, int num_ranks, const ncclUniqueId& id,
                    int rank, const ncclConfig_t* config);
ncclResult_t make_id(ncclUniqueId* id);

}  // namespace fake_nccl
