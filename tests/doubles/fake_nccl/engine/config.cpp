#include "engine/config.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "settings/errors.h"
#include "settings/settings.h"

namespace fake_nccl {
namespace {

// What a field may be besides undefined. The field is the first one that came with `since`, or one
// behind it.
struct Field {
  const char* name;
  int ncclConfig_t::* value;
  int since;
  int lowest;
  int highest;
};

constexpr Field kFields[] = {
    {"blocking", &ncclConfig_t::blocking, 21800, 0, 1},
    {"cgaClusterSize", &ncclConfig_t::cgaClusterSize, 21800, 0, 8},
    {"minCTAs", &ncclConfig_t::minCTAs, 21800, 1, INT_MAX},
    {"maxCTAs", &ncclConfig_t::maxCTAs, 21800, 1, INT_MAX},
    {"splitShare", &ncclConfig_t::splitShare, 21800, 0, 1},
    {"trafficClass", &ncclConfig_t::trafficClass, 22600, 0, INT_MAX},
    {"collnetEnable", &ncclConfig_t::collnetEnable, 22700, 0, 1},
    {"CTAPolicy", &ncclConfig_t::CTAPolicy, 22700, 0, 3},
    {"shrinkShare", &ncclConfig_t::shrinkShare, 22700, 0, 1},
    {"nvlsCTAs", &ncclConfig_t::nvlsCTAs, 22700, 1, INT_MAX},
    {"nChannelsPerNetPeer", &ncclConfig_t::nChannelsPerNetPeer, 22800, 1, INT_MAX},
    {"nvlinkCentricSched", &ncclConfig_t::nvlinkCentricSched, 22800, 0, 1},
    {"graphUsageMode", &ncclConfig_t::graphUsageMode, 22900, 0, 2},
    {"numRmaCtx", &ncclConfig_t::numRmaCtx, 22900, 0, INT_MAX},
    {"maxP2pPeers", &ncclConfig_t::maxP2pPeers, 23003, 1, INT_MAX},
    {"graphStreamOrdering", &ncclConfig_t::graphStreamOrdering, 23005, 0, 1},
    {"launchOrderImplicit", &ncclConfig_t::launchOrderImplicit, 23100, 0, 1},
    {"numRmaSig", &ncclConfig_t::numRmaSig, 23100, 0, INT_MAX},
    {"rmaEagerInit", &ncclConfig_t::rmaEagerInit, 23100, 0, 1},
    {"hostCftMode", &ncclConfig_t::hostCftMode, 23100, 1, 3},
    {"nvlsHostMode", &ncclConfig_t::nvlsHostMode, 23200, 0, INT_MAX},
};

ncclResult_t not_initialised(const char* what) {
  return failed(ncclInvalidArgument,
                std::string(what) + " is not initialised: its magic number is wrong");
}

}  // namespace

Config::Config() {
  std::memset(&values_, 0, sizeof values_);
  values_.size = sizeof values_;
  values_.magic = kConfigMagic;
  values_.version = static_cast<unsigned int>(settings().version.load());
  for (const Field& field : kFields) values_.*field.value = kUndefinedInt;
}

Config& Config::operator=(const Config& other) {
  values_ = other.values_;
  net_name_ = other.net_name_;
  name_ = other.name_;
  point();
  return *this;
}

void Config::point() {
  values_.netName = net_name_.empty() ? nullptr : net_name_.c_str();
  values_.commName = name_.empty() ? nullptr : name_.c_str();
}

ncclResult_t Config::read(const ncclConfig_t* given) {
  if (given == nullptr) return ncclSuccess;
  if (given->magic != kConfigMagic) return not_initialised("ncclConfig_t");
  ncclConfig_t copy = Config().values_;
  std::memcpy(&copy, given, std::min(given->size, sizeof copy));
  const int known = std::min(settings().version.load(), static_cast<int>(given->version));
  for (const Field& field : kFields) {
    const int value = copy.*field.value;
    // An older library does not see the field, and one that is newer than what the caller was built
    // for does not believe it.
    if (field.since > known || value == kUndefinedInt) continue;
    if (value < field.lowest || value > field.highest) {
      return failed(ncclInvalidArgument,
                    std::string("ncclConfig_t.") + field.name + " is " + std::to_string(value));
    }
    values_.*field.value = value;
  }
  if (values_.minCTAs != kUndefinedInt && values_.maxCTAs != kUndefinedInt &&
      values_.minCTAs > values_.maxCTAs) {
    return failed(ncclInvalidArgument, "ncclConfig_t.minCTAs is above maxCTAs");
  }
  if (copy.netName != nullptr) net_name_ = copy.netName;
  if (copy.commName != nullptr && known >= 22700) name_ = copy.commName;
  point();
  return ncclSuccess;
}

ncclResult_t read_call_config(const ncclCollConfig_t* given, const ncclConfig_t& communicator,
                              ncclCollConfig_t* read) {
  if (given == nullptr) return ncclSuccess;
  if (given->magic != kConfigMagic) return not_initialised("ncclCollConfig_t");
  std::memcpy(read, given, std::min(given->size, sizeof *read));
  if (std::min(settings().version.load(), static_cast<int>(given->version)) < 23203) {
    read->launchCompletionEvent = nullptr;
  }
  if (communicator.maxCTAs != kUndefinedInt && read->maxCTAs > communicator.maxCTAs) {
    return failed(ncclInvalidArgument,
                  "ncclCollConfig_t.maxCTAs is " + std::to_string(read->maxCTAs) +
                      ", above the communicator's " + std::to_string(communicator.maxCTAs));
  }
  return ncclSuccess;
}

}  // namespace fake_nccl
