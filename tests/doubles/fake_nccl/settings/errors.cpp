#include "settings/errors.h"

#include <atomic>
#include <mutex>
#include <set>

namespace fake_nccl {
namespace {

// All texts that ncclGetLastError ever returned, so that none goes away. Never destroyed: threads
// of streams outlive static objects.
struct Texts {
  std::mutex mutex;
  std::set<std::string> all;
  std::atomic<const char*> latest{""};
};

Texts& texts() {
  static Texts* const made = new Texts;
  return *made;
}

}  // namespace

ncclResult_t failed(ncclResult_t result, const std::string& text) {
  const std::lock_guard<std::mutex> lock(texts().mutex);
  texts().latest = texts().all.insert("fake NCCL: " + text).first->c_str();
  return result;
}

const char* last_error() { return texts().latest; }

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace fake_nccl
