// Communicators of NCCL over a library that records: every operation, threads that issue, poll and
// abort at the same time, parents that end before their children are there.
#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "nccl/communicator.h"
#include "nccl/names.h"

namespace {

using namespace tritondt::nccl;
using CommunicatorPtr = std::shared_ptr<Communicator>;

const cudaStream_t kStream = nullptr;

// What a test tells the library.
template <typename... Arguments>
void tell(const char* name, Arguments... arguments) {
  void* library = dlopen(RECORDING_NCCL, RTLD_NOW);
  CHECK(library != nullptr);
  reinterpret_cast<void (*)(Arguments...)>(dlsym(library, name))(arguments...);
}

CommunicatorPtr make(const std::shared_ptr<const Api>& api, const Options& options) {
  return Communicator::init(api, {ncclUniqueId{}}, 3, 1, &options);
}

// The text of what `run` throws; empty where it throws nothing.
template <typename Run>
std::string error_of(const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void check_operations(const std::shared_ptr<const Api>& api) {
  const CommunicatorPtr comm = make(api, {{"net_name", "Socket"}, {"max_ctas", std::int64_t{4}}});
  const Parts parts = {{64, 2}, {128, 0}, {256, 3}};
  const CallConfiguration configuration(api->library(), {{"alg_selection", "ring"}});
  comm->issue_all({{CallKind::kAllReduce, 64, 64, 3, ncclFloat32}}, kStream, &configuration);
  comm->issue_all(all_gather_v(comm->place(), 64, parts, ncclInt8), kStream, nullptr);
  comm->issue_all(exchange({{0, 64, 7}}, {{2, 64, 7}}), kStream, nullptr);
  comm->put({{{2, 64, 7}, 128}, {{0, 0, 0}, 0}}, 88, {0, 0}, kStream);
  comm->wait_signals({{0, 1}, {2, 1}}, {0, 0}, kStream);
  CHECK(comm->register_window(4096, 64, kWindowSymmetric, 10) == 88);
  CHECK(comm->simulate({{CallKind::kAllReduce, 64, 64, 3, ncclFloat32}}, kStream) == 12.5f);
  const std::vector<Call> wrong = {{CallKind::kSend, 64, 0, 3, ncclInt8, ncclSum, 3}};
  CHECK(has(error_of([&] { comm->issue_all(wrong, kStream, nullptr); }), "rank 3 was named"));
  tell("recording_fail", "ncclRecv", 4);
  CHECK(has(
      error_of([&] { comm->issue_all(exchange({{0, 64, 7}}, {{2, 64, 7}}), kStream, nullptr); }),
      "ncclRecv: ncclInvalidArgument"));
  CHECK(has(error_of([&] { make(api, {{"max_cta", std::int64_t{4}}}); }), "max_cta"));
  comm->finalize();
  CHECK(comm->wait(10));
  comm->destroy();
  CHECK(has(error_of([&] { comm->poll(); }), "was destroyed"));
}

// Threads that issue and poll until another aborts; then all of them are told.
void check_abort(const std::shared_ptr<const Api>& api, bool is_stuck) {
  const CommunicatorPtr comm = make(api, {});
  std::atomic<int> num_issued{0};
  std::atomic<int> num_told{0};
  std::vector<std::thread> threads;
  if (is_stuck) tell("recording_get_stuck", "ncclSend");
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      const std::string told = error_of([&] {
        while (true) {
          ++num_issued;
          comm->issue_all(exchange({{0, 64, 7}}, {{2, 64, 7}}), kStream, nullptr);
        }
      });
      CHECK(has(told, "was aborted") || (is_stuck && has(told, "ncclSend")));
      ++num_told;
    });
  }
  threads.emplace_back([&] {
    const std::string told = error_of([&] {
      while (true) comm->poll();
    });
    CHECK(has(told, "was aborted"));
    ++num_told;
  });
  while (num_issued < (is_stuck ? 1 : 200)) std::this_thread::yield();
  comm->abort();
  for (std::thread& thread : threads) thread.join();
  CHECK(num_told == 3);
  tell("recording_reset");
}

void check_children(const std::shared_ptr<const Api>& api) {
  CommunicatorPtr parent = make(api, {{"blocking", std::int64_t{0}}});
  tell("recording_set_polls", 20);
  const CommunicatorPtr child = parent->split(0, 0, nullptr);
  std::thread waiting([&] { CHECK(child->wait(60)); });
  while (!parent->poll()) std::this_thread::yield();
  waiting.join();
  parent.reset();
  CHECK(child->place().num_ranks == 1);
  tell("recording_set_polls", 1'000'000'000);
  const CommunicatorPtr pending = child->split(0, 0, nullptr);
  std::thread told([&] { CHECK(has(error_of([&] { pending->wait(60); }), "was aborted")); });
  child->abort();
  told.join();
  tell("recording_reset");
}

}  // namespace

void check_nccl() {
  const auto api = std::make_shared<const Api>(RECORDING_NCCL, "");
  check_operations(api);
  check_abort(api, false);
  check_abort(api, true);
  check_children(api);
}
