#pragma once

#include <string>

#include "interface/nccl_abi.h"

namespace fake_nccl {

// Keeps what ncclGetLastError says, and hands the result back.
ncclResult_t failed(ncclResult_t result, const std::string& text);
const char* last_error();

// "2.28.7" of 22807.
std::string version_text(int version);

}  // namespace fake_nccl
