#pragma once

#include <cstdint>
#include <stdexcept>
#include <utility>

#include "transport/timed_exchange.h"

namespace tritondt {

inline const char* name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::kDone:
      return "done";
    case Outcome::kPending:
      return "pending";
    case Outcome::kClosed:
      return "closed";
    case Outcome::kMismatch:
      return "mismatch";
    case Outcome::kUnexpected:
      return "unexpected";
    case Outcome::kInterrupted:
      return "interrupted";
    case Outcome::kExpired:
      return "expired";
  }
  throw std::logic_error("an outcome without a name");
}

// An ending as Python reads it: (outcome, peer).
inline std::pair<const char*, std::int64_t> ending_of(const Ending& ending) {
  return {name_of(ending.outcome), ending.peer};
}

}  // namespace tritondt
