#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/reduction.h"
#include "interface/nccl_abi.h"
#include "settings/faults.h"

namespace fake_nccl {

enum class Collective : std::uint32_t {
  kAllReduce,
  kReduceScatter,
  kReduce,
  kAllGather,
  kAlltoAll,
  kBroadcast,
  kGather,
  kScatter,
  kMessage,  // a send, which meets a receive
  kAgreement,
};

// What both ends of a message must say alike.
struct Tag {
  Collective collective;
  std::uint32_t dtype;
  std::uint32_t op;
  std::uint32_t root;
};

struct Message {
  int peer;
  Tag tag;
  char* bytes;
  std::uint64_t num_bytes;
};

struct Copy {
  const void* source;
  void* target;
  std::size_t num_bytes;
};

// Bytes that go to memory of a peer, if any, and a signal to it.
struct Put {
  Copy copy;
  int peer;
  std::shared_ptr<const void> window;  // stays while this is on its way
};

struct Awaited {
  int peer;
  std::uint64_t num_signals;
};

// What one call makes one rank do, as values: messages, and what comes before and after them.
struct Task {
  std::optional<Scaling> scaling;
  std::vector<Message> sends;
  std::vector<Message> receives;
  std::vector<Copy> copies;
  std::optional<Reduction> reduction;
  std::vector<Put> puts;
  std::vector<Awaited> awaited;
  std::vector<std::unique_ptr<char[]>> staging;
  Fate fate;
};

}  // namespace fake_nccl
