#include "nccl/config.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>

namespace tritondt::nccl {
namespace {

// kWord: 64 bits without a sign, an address among them.
enum class Kind { kInt, kWord, kText };

// One field of a configuration, and the version that appended it.
struct Field {
  const char* name;
  std::size_t offset;
  Kind kind;
  int since;
};

constexpr std::size_t size_of(Kind kind) {
  return kind == Kind::kInt ? sizeof(int) : sizeof(std::uint64_t);
}
static_assert(sizeof(void*) == sizeof(std::uint64_t), "addresses are stored as 64 bits");

template <typename Struct>
struct Traits;

template <>
struct Traits<ncclConfig_t> {
  using S = ncclConfig_t;
  static constexpr const char* kOwner = "a communicator";
  static constexpr Field kFields[] = {
      {"blocking", offsetof(S, blocking), Kind::kInt, 21400},
      {"cga_cluster_size", offsetof(S, cgaClusterSize), Kind::kInt, 21700},
      {"min_ctas", offsetof(S, minCTAs), Kind::kInt, 21700},
      {"max_ctas", offsetof(S, maxCTAs), Kind::kInt, 21700},
      {"net_name", offsetof(S, netName), Kind::kText, 21700},
      {"split_share", offsetof(S, splitShare), Kind::kInt, 21801},
      {"traffic_class", offsetof(S, trafficClass), Kind::kInt, 22602},
      {"comm_name", offsetof(S, commName), Kind::kText, 22703},
      {"collnet_enable", offsetof(S, collnetEnable), Kind::kInt, 22703},
      {"cta_policy", offsetof(S, CTAPolicy), Kind::kInt, 22703},
      {"shrink_share", offsetof(S, shrinkShare), Kind::kInt, 22703},
      {"nvls_ctas", offsetof(S, nvlsCTAs), Kind::kInt, 22703},
      {"n_channels_per_net_peer", offsetof(S, nChannelsPerNetPeer), Kind::kInt, 22803},
      {"nvlink_centric_sched", offsetof(S, nvlinkCentricSched), Kind::kInt, 22803},
      {"graph_usage_mode", offsetof(S, graphUsageMode), Kind::kInt, 22902},
      {"num_rma_ctx", offsetof(S, numRmaCtx), Kind::kInt, 22902},
      {"max_p2p_peers", offsetof(S, maxP2pPeers), Kind::kInt, 23003},
      {"graph_stream_ordering", offsetof(S, graphStreamOrdering), Kind::kInt, 23005},
      {"launch_order_implicit", offsetof(S, launchOrderImplicit), Kind::kInt, 23102},
      {"num_rma_sig", offsetof(S, numRmaSig), Kind::kInt, 23102},
      {"rma_eager_init", offsetof(S, rmaEagerInit), Kind::kInt, 23102},
      {"host_cft_mode", offsetof(S, hostCftMode), Kind::kInt, 23102},
      {"nvls_host_mode", offsetof(S, nvlsHostMode), Kind::kInt, 23203},
  };
};

template <>
struct Traits<ncclCollConfig_t> {
  using S = ncclCollConfig_t;
  static constexpr const char* kOwner = "a call";
  static constexpr Field kFields[] = {
      {"min_ctas", offsetof(S, minCTAs), Kind::kInt, 23102},
      {"max_ctas", offsetof(S, maxCTAs), Kind::kInt, 23102},
      {"nvls_ctas", offsetof(S, nvlsCTAs), Kind::kInt, 23102},
      {"cga_cluster_size", offsetof(S, cgaClusterSize), Kind::kInt, 23102},
      {"alg_selection", offsetof(S, algSelection), Kind::kText, 23102},
      {"force_alg_selection", offsetof(S, forceAlgSelection), Kind::kInt, 23102},
      {"cta_policy", offsetof(S, CTAPolicy), Kind::kInt, 23102},
      {"user_profiler_tag", offsetof(S, userProfilerTag), Kind::kWord, 23102},
      {"launch_completion_event", offsetof(S, launchCompletionEvent), Kind::kWord, 23203},
  };
};

template <typename Struct>
const Field& field_of(const std::string& name) {
  for (const Field& field : Traits<Struct>::kFields) {
    if (name == field.name) return field;
  }
  std::string known;
  for (const Field& field : Traits<Struct>::kFields) {
    known += (known.empty() ? "" : ", ") + std::string(field.name);
  }
  throw std::invalid_argument("the option " + name + " of " + Traits<Struct>::kOwner +
                              " was asked for; NCCL has " + known);
}

std::string text_of(const OptionValue& value) {
  if (const auto* number = std::get_if<std::int64_t>(&value)) return std::to_string(*number);
  const auto& text = std::get<std::string>(value);
  return text.find('\0') == std::string::npos ? "'" + text + "'" : "a text with a zero byte";
}

[[noreturn]] void refuse(const Field& field, const OptionValue& value) {
  const char* allowed = field.kind == Kind::kText  ? "a text without a zero byte"
                        : field.kind == Kind::kInt ? "an integer of 32 bits"
                                                   : "an integer from 0 on";
  throw std::invalid_argument("the option " + std::string(field.name) + " is " + text_of(value) +
                              "; it must be " + allowed);
}

template <typename Value>
void store(void* target, Value value) {
  std::memcpy(target, &value, sizeof(value));
}

void store_number(const Field& field, const OptionValue& option, char* target) {
  const auto* number = std::get_if<std::int64_t>(&option);
  if (number == nullptr) refuse(field, option);
  if (field.kind == Kind::kInt) {
    if (*number < INT_MIN || *number > INT_MAX) refuse(field, option);
    store(target, static_cast<int>(*number));
    return;
  }
  if (*number < 0) refuse(field, option);
  store(target, static_cast<std::uint64_t>(*number));
}

}  // namespace

template <typename Struct>
std::size_t size_in(int version) {
  std::size_t end = 0;
  for (const Field& field : Traits<Struct>::kFields) {
    if (field.since <= version) end = std::max(end, field.offset + size_of(field.kind));
  }
  return (end + alignof(Struct) - 1) / alignof(Struct) * alignof(Struct);
}

template <typename Struct>
Configuration<Struct>::Configuration(const Library& library, const Options& options) {
  value_.size = size_in<Struct>(library.version());
  value_.version = static_cast<unsigned int>(std::min(library.version(), kHeaderVersion));
  for (const auto& [name, option] : options) {
    const Field& field = field_of<Struct>(name);
    if (field.since > library.version()) {
      throw_unsupported(library.description(),
                        "the option " + name + " of " + Traits<Struct>::kOwner, field.since);
    }
    char* target = reinterpret_cast<char*>(&value_) + field.offset;
    if (field.kind != Kind::kText) {
      store_number(field, option, target);
      continue;
    }
    const auto* text = std::get_if<std::string>(&option);
    if (text == nullptr || text->find('\0') != std::string::npos) refuse(field, option);
    texts_.push_back(*text);
    store(target, texts_.back().c_str());
  }
}

template class Configuration<ncclConfig_t>;
template class Configuration<ncclCollConfig_t>;
template std::size_t size_in<ncclConfig_t>(int version);
template std::size_t size_in<ncclCollConfig_t>(int version);

}  // namespace tritondt::nccl
