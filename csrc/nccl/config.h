#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <variant>

#include "nccl/api.h"

namespace tritondt::nccl {

// Options by name, such as {"max_ctas", 8} or {"net_name", "Socket"}: the fields of NCCL's
// configurations in words.
using OptionValue = std::variant<std::int64_t, std::string>;
using Options = std::map<std::string, OptionValue>;

// A configuration and the texts that it points to. It is laid out as the loaded version has it: as
// by a program that was compiled with that version's header.
template <typename Struct>
class Configuration {
 public:
  // Throws Unsupported for an option that the library is too old for, and std::invalid_argument for
  // one that does not exist or cannot have this value.
  Configuration(const Library& library, const Options& options);
  Configuration(const Configuration&) = delete;
  Configuration& operator=(const Configuration&) = delete;

  Struct* get() { return &value_; }
  const Struct* get() const { return &value_; }

 private:
  Struct value_;
  std::list<std::string> texts_;
};

using CommConfiguration = Configuration<ncclConfig_t>;
using CallConfiguration = Configuration<ncclCollConfig_t>;

// sizeof(Struct) in NCCL's header of a version.
template <typename Struct>
std::size_t size_in(int version);

}  // namespace tritondt::nccl
