#include "nccl/api.h"

#include <dlfcn.h>
#include <link.h>

namespace tritondt::nccl {
namespace {

constexpr const char* kLibraryName = "libnccl.so.2";
constexpr const char* kLoad = "dlopen";

// An explicit path may be a second copy beside torch's. Where torch's symbols are global, 17 to 19
// functions of the second would call into the first (measured with 2.30.7 and 2.32.3); with
// RTLD_DEEPBIND none does. A sanitizer's dlopen refuses the flag.
int explicit_flags() {
  int flags = RTLD_NOW | RTLD_LOCAL;
#if defined(RTLD_DEEPBIND)
  const bool is_sanitized = dlsym(RTLD_DEFAULT, "__asan_init") != nullptr ||
                            dlsym(RTLD_DEFAULT, "__tsan_init") != nullptr;
  if (!is_sanitized) flags |= RTLD_DEEPBIND;
#endif
  return flags;
}

void* open_or_throw(const std::string& path, int flags) {
  void* handle = dlopen(path.c_str(), flags);
  if (handle == nullptr) {
    throw Error(kLoad, "NCCL was to be loaded from " + path + ", which failed: " + dlerror());
  }
  return handle;
}

std::string path_of(void* handle) {
  const link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) throw Error("dlinfo", dlerror());
  return map->l_name;
}

}  // namespace

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

const char* name_of(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "ncclSuccess";
    case ncclUnhandledCudaError:
      return "ncclUnhandledCudaError";
    case ncclSystemError:
      return "ncclSystemError";
    case ncclInternalError:
      return "ncclInternalError";
    case ncclInvalidArgument:
      return "ncclInvalidArgument";
    case ncclInvalidUsage:
      return "ncclInvalidUsage";
    case ncclRemoteError:
      return "ncclRemoteError";
    case ncclInProgress:
      return "ncclInProgress";
    case ncclTimeout:
      return "ncclTimeout";
  }
  return "a result that this build does not know";
}

void throw_unsupported(const std::string& library, const std::string& what, int since) {
  throw Unsupported(what, what + " was asked for; NCCL has it from " + version_text(since) +
                              " on, and " + library +
                              " is in use. TRITONDT_NCCL_SO can name another library");
}

Library::Library(const std::string& explicit_path, const std::string& installed_path) {
  if (!explicit_path.empty()) {
    origin_ = Origin::kExplicit;
    handle_ = open_or_throw(explicit_path, explicit_flags());
  } else if (void* loaded = dlopen(kLibraryName, RTLD_NOW | RTLD_NOLOAD)) {
    origin_ = Origin::kLoaded;
    handle_ = loaded;
  } else if (!installed_path.empty()) {
    origin_ = Origin::kInstalled;
    handle_ = open_or_throw(installed_path, RTLD_NOW | RTLD_LOCAL);
  } else {
    throw Error(kLoad,
                "no NCCL was found: this process has loaded no libnccl.so.2, and neither "
                "nvidia-nccl-cu12 nor nvidia-nccl-cu13 is installed. Install the one for torch's "
                "CUDA, or name a library with TRITONDT_NCCL_SO");
  }
  path_ = path_of(handle_);
  void* get_version = find("ncclGetVersion");
  if (get_version == nullptr) {
    throw Error("ncclGetVersion", path_ + " is no NCCL: it has no ncclGetVersion");
  }
  const auto result = reinterpret_cast<ncclResult_t (*)(int*)>(get_version)(&version_);
  if (result != ncclSuccess) {
    throw Error("ncclGetVersion", "ncclGetVersion of " + path_ + ": " + name_of(result), result);
  }
  if (version_ < kOldestVersion) {
    throw Unsupported("ncclGetVersion", description() +
                                            " was found; the oldest that can be used is " +
                                            version_text(kOldestVersion));
  }
}

std::string Library::description() const {
  return "NCCL " + version_text(version_) + " (" + path_ + ")";
}

void* Library::find(const char* name) const { return dlsym(handle_, name); }

Api::Api(const std::string& explicit_path, const std::string& installed_path)
    : nccl_{Library(explicit_path, installed_path)} {}

// ncclGetLastError takes a communicator and does not look at it; one that another thread aborts
// meanwhile is better not named.
void Api::check(ncclResult_t result, const char* function) const {
  if (result == ncclSuccess || result == ncclInProgress) return;
  std::string text =
      std::string(function) + ": " + name_of(result) + ", " + ncclGetErrorString(result);
  const char* last = ncclGetLastError(nullptr);
  if (last != nullptr && *last != '\0') text += "; NCCL's last error: " + std::string(last);
  throw Error(function, text + "; " + library().description(), result);
}

}  // namespace tritondt::nccl
