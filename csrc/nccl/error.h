#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "nccl/types.h"

namespace tritondt::nccl {

// "2.32.3" of 23203.
std::string version_text(int version);

// "ncclInvalidUsage" of 5.
const char* name_of(ncclResult_t result);

// A call of NCCL that failed, or that could not be made: then `result` is ncclSuccess.
class Error : public std::runtime_error {
 public:
  Error(std::string called, const std::string& text, ncclResult_t found = ncclSuccess)
      : std::runtime_error(text), function(std::move(called)), result(found) {}

  const std::string function;
  const ncclResult_t result;
};

// What the library that is loaded, or the machine, does not have.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// What came with the version `since` and was asked of the library so described.
[[noreturn]] void throw_unsupported(const std::string& library, const std::string& what, int since);

}  // namespace tritondt::nccl
