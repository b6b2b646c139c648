// Collectives of MPI in loops: mpi_loops WARM_UP BLOCKS [COLLECTIVE BYTES CALLS]...
//
// A block is a barrier and so many calls in a row; rank 0 writes a line for each case, the seconds
// that a call of each block took the slowest rank. Bytes are those of the largest tensor of a rank.

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Call = std::function<void()>;

struct Buffers {
  std::vector<float> whole, other, part;
  int count;       // elements of the largest tensor
  int part_count;  // of one rank's part of it
};

Call call_of(const std::string& collective, Buffers* buffers, int rank) {
  float* const whole = buffers->whole.data();
  float* const other = buffers->other.data();
  float* const part = buffers->part.data();
  const int count = buffers->count, part_count = buffers->part_count;
  const bool is_root = rank == 0;
  const MPI_Comm all = MPI_COMM_WORLD;
  const std::map<std::string, Call> calls = {
      {"all_reduce", [=] { MPI_Allreduce(MPI_IN_PLACE, whole, count, MPI_FLOAT, MPI_SUM, all); }},
      {"reduce",
       [=] {
         MPI_Reduce(is_root ? MPI_IN_PLACE : whole, whole, count, MPI_FLOAT, MPI_SUM, 0, all);
       }},
      {"all_gather",
       [=] { MPI_Allgather(part, part_count, MPI_FLOAT, whole, part_count, MPI_FLOAT, all); }},
      {"reduce_scatter",
       [=] { MPI_Reduce_scatter_block(whole, part, part_count, MPI_FLOAT, MPI_SUM, all); }},
      {"broadcast", [=] { MPI_Bcast(whole, count, MPI_FLOAT, 0, all); }},
      {"gather",
       [=] { MPI_Gather(part, part_count, MPI_FLOAT, whole, part_count, MPI_FLOAT, 0, all); }},
      {"scatter",
       [=] { MPI_Scatter(whole, part_count, MPI_FLOAT, part, part_count, MPI_FLOAT, 0, all); }},
      {"all_to_all",
       [=] { MPI_Alltoall(whole, part_count, MPI_FLOAT, other, part_count, MPI_FLOAT, all); }},
      {"barrier", [=] { MPI_Barrier(all); }},
  };
  const auto found = calls.find(collective);
  if (found == calls.end()) throw std::invalid_argument("no collective " + collective);
  return found->second;
}

void measure(const std::string& collective, int num_bytes, int num_calls, int warm_up,
             int num_blocks) {
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  Buffers buffers;
  buffers.count = num_bytes / static_cast<int>(sizeof(float));
  buffers.part_count = buffers.count / size;
  for (std::vector<float>* each : {&buffers.whole, &buffers.other, &buffers.part}) {
    each->assign(static_cast<std::size_t>(buffers.count) + 1, 0.0F);
  }
  const Call call = call_of(collective, &buffers, rank);
  for (int i = 0; i < warm_up; ++i) call();
  if (rank == 0) std::printf("%s %d", collective.c_str(), num_bytes);
  for (int block = 0; block < num_blocks; ++block) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double started = MPI_Wtime();
    for (int i = 0; i < num_calls; ++i) call();
    const double own = (MPI_Wtime() - started) / num_calls;
    double slowest;
    MPI_Reduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) std::printf(" %.9f", slowest);
  }
  if (rank == 0) std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int warm_up = std::atoi(argv[1]), num_blocks = std::atoi(argv[2]);
  for (int i = 3; i + 2 < argc; i += 3) {
    measure(argv[i], std::atoi(argv[i + 1]), std::atoi(argv[i + 2]), warm_up, num_blocks);
  }
  MPI_Finalize();
  return 0;
}
