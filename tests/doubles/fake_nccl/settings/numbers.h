#pragma once

#include <string>

namespace fake_nccl {

// A whole number of digits alone; -1 where `text` is none.
inline long number(const std::string& text) {
  const bool is_number = !text.empty() && text.size() < 10 &&
                         text.find_first_not_of("0123456789") == std::string::npos;
  return is_number ? std::stol(text) : -1;
}

}  // namespace fake_nccl
