#pragma once

#include <cstdint>
#include <string>

#include "interface/nccl_abi.h"

namespace fake_nccl {

// NCCL's functions by their own names, as functions.def lists them.
enum class Function {
#define FUNCTION(name, since) name,
#include "interface/functions.def"
#undef FUNCTION
};
const char* name_of(Function function);
// The version that brought it.
int since(Function function);

// What is to become of one call.
struct Fate {
  ncclResult_t failure = ncclSuccess;      // returned at once
  ncclResult_t async_error = ncclSuccess;  // met when the operation runs
  bool stalls = false;                     // the operation never comes to its end
};

// Replaces all faults of one effect by those of a list such as "ncclAllReduce:3,ncclSend:1:6":
// function, which call from here on, and the result where it is not the usual one. False, and
// nothing is changed, where the list is none.
enum class Effect { kFail, kStall, kAsync };
bool set_faults(Effect effect, const std::string& list);

// Counts a call.
Fate strike(Function function);

// Kills this process at the so manieth step from here on, 0 for never. A step is whatever others
// may see of a rank: that it has come, has sent, has taken, has rung.
void die_at(std::int64_t number);
void step();

}  // namespace fake_nccl
