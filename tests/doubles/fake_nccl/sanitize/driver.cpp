// Drives the double with ranks as threads, and as processes; built with sanitizers by its Makefile.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "interface/fake_api.h"

namespace {

using Floats = std::vector<float>;

void ok(ncclResult_t result) {
  if (result != ncclSuccess) std::fprintf(stderr, "%s\n", ncclGetLastError(nullptr));
  CHECK(result == ncclSuccess);
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

ncclUniqueId new_id() {
  ncclUniqueId id;
  ok(ncclGetUniqueId(&id));
  return id;
}

ncclConfig_t config_of(int blocking) {
  ncclConfig_t config;
  config.size = sizeof config;
  config.magic = kConfigMagic;
  config.version = 23203;
  int* fields[] = {&config.cgaClusterSize,
                   &config.minCTAs,
                   &config.maxCTAs,
                   &config.splitShare,
                   &config.trafficClass,
                   &config.collnetEnable,
                   &config.CTAPolicy,
                   &config.shrinkShare,
                   &config.nvlsCTAs,
                   &config.nChannelsPerNetPeer,
                   &config.nvlinkCentricSched,
                   &config.graphUsageMode,
                   &config.numRmaCtx,
                   &config.maxP2pPeers,
                   &config.graphStreamOrdering,
                   &config.launchOrderImplicit,
                   &config.numRmaSig,
                   &config.rmaEagerInit,
                   &config.hostCftMode,
                   &config.nvlsHostMode};
  for (int* field : fields) *field = kUndefinedInt;
  config.blocking = blocking;
  config.netName = config.commName = nullptr;
  return config;
}

// One rank: a communicator and a stream.
struct Rank {
  Rank(int index, int number_of_ranks, const ncclUniqueId& id)
      : rank(index), num_ranks(number_of_ranks) {
    ok(ncclCommInitRank(&comm, num_ranks, id, rank));
    ok(fakeStreamCreate(&stream));
  }
  // Waits for a state other than `state`, and returns it.
  ncclResult_t leave(ncclResult_t state) const {
    ncclResult_t found = state;
    while (found == state) {
      ok(ncclCommGetAsyncError(comm, &found));
      sleep_ms(1);
    }
    return found;
  }
  void destroy() const {
    ok(ncclCommDestroy(comm));
    ok(fakeStreamDestroy(stream));
  }

  const int rank;
  const int num_ranks;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
};

// Calls body(rank) on a thread for every rank of a new communicator.
void on_threads(int num_ranks, const std::function<void(const Rank&)>& body) {
  const ncclUniqueId id = new_id();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] { body(Rank(rank, num_ranks, id)); });
  }
  for (std::thread& thread : threads) thread.join();
}

void check_sum(const Rank& here, std::size_t count) {
  const Floats given(count, static_cast<float>(here.rank + 1));
  Floats taken(count);
  ok(ncclAllReduce(given.data(), taken.data(), count, ncclFloat32, ncclSum, here.comm,
                   here.stream));
  ok(fakeStreamSynchronize(here.stream));
  const int sum = here.num_ranks * (here.num_ranks + 1) / 2;
  for (const float value : taken) CHECK(value == static_cast<float>(sum));
}

float element(int source, int target, std::size_t index) {
  return static_cast<float>(100000 * source + 10000 * target) + static_cast<float>(index);
}

// Uneven messages between all ranks as one group; buffers are exactly as large as needed, so that a
// byte too far is found. Packed by one stream, exchanged in another.
void check_exchange(const Rank& here, cudaStream_t packing, unsigned seed) {
  std::mt19937 draw(seed);
  const auto num_ranks = static_cast<std::size_t>(here.num_ranks);
  std::vector<std::vector<std::size_t>> lengths(num_ranks, std::vector<std::size_t>(num_ranks));
  for (auto& row : lengths) {
    for (std::size_t& length : row) length = draw() % 3 == 0 ? 0 : draw() % 9000;
  }
  std::vector<Floats> sends, packed, receives;
  cudaEvent_t is_packed;
  ok(fakeEventCreate(&is_packed));
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    sends.emplace_back(lengths[static_cast<std::size_t>(here.rank)][peer]);
    packed.emplace_back(sends.back().size());
    receives.emplace_back(lengths[peer][static_cast<std::size_t>(here.rank)]);
    for (std::size_t i = 0; i < sends.back().size(); ++i) {
      sends.back()[i] = element(here.rank, static_cast<int>(peer), i);
    }
  }
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    if (sends[peer].empty()) continue;
    ok(fakeStreamCopy(packing, packed[peer].data(), sends[peer].data(), 4 * sends[peer].size()));
  }
  ok(fakeEventRecord(is_packed, packing));
  ok(fakeStreamWaitEvent(here.stream, is_packed));
  ok(ncclGroupStart());
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    const int other = static_cast<int>(peer);
    ok(ncclSend(packed[peer].data(), packed[peer].size(), ncclFloat32, other, here.comm,
                here.stream));
    ok(ncclRecv(receives[peer].data(), receives[peer].size(), ncclFloat32, other, here.comm,
                here.stream));
  }
  ok(ncclGroupEnd());
  ok(fakeStreamSynchronize(here.stream));
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    for (std::size_t i = 0; i < receives[peer].size(); ++i) {
      CHECK(receives[peer][i] == element(static_cast<int>(peer), here.rank, i));
    }
  }
  ok(fakeEventDestroy(is_packed));
}

void run_programs(const Rank& here) {
  cudaStream_t packing;
  ok(fakeStreamCreate(&packing));
  for (unsigned seed = 0; seed < 12; ++seed) {
    check_exchange(here, packing, seed);
    check_sum(here, seed * 997 % 5000);
  }
  ok(fakeStreamDestroy(packing));
  here.destroy();
}

void check_programs() {
  for (const char* ring_bytes : {"16", "4096", "65536"}) {
    ok(fakeSet("FAKE_NCCL_RING_BYTES", ring_bytes));
    on_threads(3, run_programs);
  }
}

void check_regrouping() {
  on_threads(4, [](const Rank& here) {
    Rank half = here;
    ok(ncclCommSplit(here.comm, here.rank % 2, here.rank, &half.comm, nullptr));
    ok(ncclCommDestroy(half.comm));
    int excluded = 3;
    if (here.rank != excluded) {
      ok(ncclCommShrink(here.comm, &excluded, 1, &half.comm, nullptr, 0));
      ok(ncclCommAbort(half.comm));
    }
    check_sum(here, 10);
    here.destroy();
  });
}

void check_windows() {
  on_threads(3, [](const Rank& here) {
    void* memory;
    ok(ncclMemAlloc(&memory, 4096));
    ncclWindow_t window;
    ok(ncclCommWindowRegister(here.comm, memory, 4096, &window, 1));
    const int right = (here.rank + 1) % here.num_ranks, left = (here.rank + 2) % here.num_ranks;
    // What is put lies in a window, too.
    float* number = static_cast<float*>(memory) + 16;
    *number = static_cast<float>(here.rank);
    for (int i = 0; i < 20; ++i) {
      ok(ncclPutSignal(number, 1, ncclFloat32, right, window, 8, 0, 0, 0, here.comm, here.stream));
      ncclWaitSignalDesc_t awaited = {1, left, 0, 0};
      ok(ncclWaitSignal(1, &awaited, here.comm, here.stream));
    }
    ok(fakeStreamSynchronize(here.stream));
    CHECK(static_cast<float*>(memory)[2] == static_cast<float>(left));
    check_sum(here, 1);  // nobody gives memory back that another still writes to
    ok(ncclCommWindowDeregister(here.comm, window));
    here.destroy();
    ok(ncclMemFree(memory));
  });
}

// Rank 0 aborts in the midst of something; the others hear of it and abort while more is issued.
void check_aborts() {
  ok(fakeSet("FAKE_NCCL_PEER_LOSS", "error"));
  for (unsigned seed = 0; seed < 15; ++seed) {
    on_threads(3, [seed](const Rank& here) {
      std::thread watching([&here, seed] {
        if (here.rank == 0) {
          sleep_ms(static_cast<int>(seed % 5));
        } else {
          CHECK(here.leave(ncclSuccess) == ncclRemoteError);
        }
        ok(ncclCommAbort(here.comm));
      });
      Floats given(3000, 1), taken(3000);
      ncclResult_t issued = ncclSuccess;
      for (int i = 0; issued == ncclSuccess; ++i) {
        issued = ncclAllReduce(given.data(), taken.data(), given.size(), ncclFloat32, ncclSum,
                               here.comm, here.stream);
        if (i % 4 == 3) ok(fakeStreamSynchronize(here.stream));
      }
      watching.join();
      // What is left in the stream touches nothing any more.
      given = Floats();
      taken = Floats();
      ok(fakeStreamSynchronize(here.stream));
      ok(fakeStreamDestroy(here.stream));
    });
  }
  ok(fakeSet("FAKE_NCCL_PEER_LOSS", "wait"));
}

// Ranks that leave as soon as they are done are no losses to those that are not.
void check_leaving() {
  ok(fakeSet("FAKE_NCCL_PEER_LOSS", "error"));
  for (int i = 0; i < 100; ++i) {
    on_threads(3, [](const Rank& here) {
      check_sum(here, 20000);
      here.destroy();
    });
  }
  ok(fakeSet("FAKE_NCCL_PEER_LOSS", "wait"));
}

// Communicators that do not block: aborted while they are made, used, and split.
void check_background() {
  ok(fakeSet("FAKE_NCCL_DELAY_MS", "3"));
  for (int i = 0; i < 10; ++i) {
    const ncclUniqueId id = new_id();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&id, i, rank] {
        ncclConfig_t config = config_of(0);
        ncclComm_t comm, child = nullptr;
        CHECK(ncclCommInitRankConfig(&comm, 3, id, rank, &config) == ncclInProgress);
        ncclResult_t state = ncclInProgress;
        while (i % 2 == 1 && state == ncclInProgress) ok(ncclCommGetAsyncError(comm, &state));
        if (i % 2 == 1) CHECK(ncclCommSplit(comm, 0, 0, &child, nullptr) == ncclInProgress);
        sleep_ms(i % 5);
        ok(ncclCommAbort(comm));  // after it nothing is written to `child` any more
        if (child != nullptr) ok(ncclCommAbort(child));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  ok(fakeSet("FAKE_NCCL_DELAY_MS", "0"));
}

// Ranks as processes, one of which is killed: the others end, as they watch for that.
void check_processes() {
  const ncclUniqueId id = new_id();
  constexpr int kNumRanks = 3;
  pid_t children[kNumRanks];
  for (int rank = 0; rank < kNumRanks; ++rank) {
    children[rank] = fork();
    CHECK(children[rank] >= 0);
    if (children[rank] != 0) continue;
    ok(fakeSet("FAKE_NCCL_PEER_LOSS", "error"));
    const Rank here(rank, kNumRanks, id);
    check_sum(here, 50000);
    if (rank == 1) raise(SIGKILL);
    Floats value(1);
    ok(ncclAllReduce(value.data(), value.data(), 1, ncclFloat32, ncclSum, here.comm, here.stream));
    CHECK(here.leave(ncclSuccess) == ncclRemoteError);
    ok(ncclCommAbort(here.comm));
    ok(fakeStreamSynchronize(here.stream));
    _exit(0);
  }
  for (int rank = 0; rank < kNumRanks; ++rank) {
    int status;
    CHECK(waitpid(children[rank], &status, 0) == children[rank]);
    CHECK(rank == 1 ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

}  // namespace

int main() {
  const struct {
    const char* name;
    void (*run)();
  } parts[] = {{"processes", check_processes},  // first: a fork takes no threads along
               {"programs", check_programs},   {"regrouping", check_regrouping},
               {"windows", check_windows},     {"aborts", check_aborts},
               {"leaving", check_leaving},     {"background", check_background}};
  for (const auto& part : parts) {
    const auto started = std::chrono::steady_clock::now();
    part.run();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
    std::printf("%s: %.1f s\n", part.name, taken.count());
    std::fflush(stdout);
  }
  return 0;
}
