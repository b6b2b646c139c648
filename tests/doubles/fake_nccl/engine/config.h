#pragma once

#include <string>

#include "interface/nccl_abi.h"

namespace fake_nccl {

// A communicator's configuration as the version played reads it: fields that came later are left
// as they are, and what the user's pointers point to is copied.
class Config {
 public:
  Config();
  Config(const Config& other) { *this = other; }
  Config& operator=(const Config& other);

  // Takes over what the user sets; a null pointer changes nothing.
  ncclResult_t read(const ncclConfig_t* given);
  const ncclConfig_t& values() const { return values_; }
  bool is_blocking() const { return values_.blocking != 0; }

 private:
  void point();

  ncclConfig_t values_;
  std::string net_name_;
  std::string name_;
};

// Checks a call's configuration and copies what the version played knows of it.
ncclResult_t read_call_config(const ncclCollConfig_t* given, const ncclConfig_t& communicator,
                              ncclCollConfig_t* read);

}  // namespace fake_nccl
