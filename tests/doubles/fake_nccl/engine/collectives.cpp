#include "engine/collectives.h"

#include <utility>

namespace fake_nccl {
namespace {

class Planner {
 public:
  Planner(const Call& call, int rank, int num_ranks)
      : call_(call),
        rank_(rank),
        num_ranks_(num_ranks),
        piece_bytes_(call.count * size_of(call.dtype)),
        is_root_(rank == call.root) {}

  Task plan() {
    if (call_.count == 0) return std::move(task_);
    switch (call_.collective) {
      case Collective::kAllReduce:
      case Collective::kReduceScatter:
      case Collective::kReduce:
        reduce();
        break;
      case Collective::kAllGather:
        send_to_all([](int) { return 0; });
        receive_from_all();
        keep(0, rank_);
        break;
      case Collective::kAlltoAll:
        send_to_all([](int peer) { return peer; });
        receive_from_all();
        keep(rank_, rank_);
        break;
      case Collective::kBroadcast:
        is_root_ ? send_to_all([](int) { return 0; }) : receive(call_.root, call_.target);
        if (is_root_) keep(0, 0);
        break;
      case Collective::kGather:
        is_root_ ? receive_from_all() : send(call_.root, call_.source);
        if (is_root_) keep(0, rank_);
        break;
      case Collective::kScatter:
        is_root_ ? send_to_all([](int peer) { return peer; }) : receive(call_.root, call_.target);
        if (is_root_) keep(rank_, 0);
        break;
      case Collective::kMessage:
      case Collective::kAgreement:
        break;
    }
    return std::move(task_);
  }

 private:
  // Everybody who holds a result is sent what all others give to it, and adds in order of rank.
  void reduce() {
    const bool is_scattered = call_.collective == Collective::kReduceScatter;
    const bool has_result = call_.collective != Collective::kReduce || is_root_;
    const int num_pieces = is_scattered ? num_ranks_ : 1;
    const void* given = call_.source;
    if (call_.factor.has_value()) {
      char* scaled = stage(static_cast<std::size_t>(num_pieces) * piece_bytes_);
      task_.scaling = Scaling{*call_.factor, call_.source, scaled,
                              static_cast<std::size_t>(num_pieces) * call_.count};
      given = scaled;
    }
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank_ || (call_.collective == Collective::kReduce && peer != call_.root))
        continue;
      send(peer, piece(given, is_scattered ? peer : 0));
    }
    if (!has_result) return;
    task_.reduction = Reduction{call_.dtype, call_.op, {}, call_.target, call_.count};
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank_) {
        task_.reduction->slots.push_back(piece(given, is_scattered ? rank_ : 0));
      } else {
        char* slot = stage(piece_bytes_);
        receive(peer, slot);
        task_.reduction->slots.push_back(slot);
      }
    }
  }

  template <typename PieceOf>
  void send_to_all(const PieceOf& piece_of) {
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer != rank_) send(peer, piece(call_.source, piece_of(peer)));
    }
  }

  void receive_from_all() {
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer != rank_) receive(peer, const_cast<void*>(piece(call_.target, peer)));
    }
  }

  // A piece that this rank has already; in place, nothing is to be done.
  void keep(int source_piece, int target_piece) {
    const void* source = piece(call_.source, source_piece);
    auto* target = const_cast<void*>(piece(call_.target, target_piece));
    if (source != target) task_.copies.push_back({source, target, piece_bytes_});
  }

  void send(int peer, const void* bytes) {
    // A message is read where it is sent and written where it is received.
    auto* source = static_cast<char*>(const_cast<void*>(bytes));
    task_.sends.push_back({peer, tag(), source, piece_bytes_});
  }

  void receive(int peer, void* bytes) {
    task_.receives.push_back({peer, tag(), static_cast<char*>(bytes), piece_bytes_});
  }

  Tag tag() const {
    return {call_.collective, static_cast<std::uint32_t>(call_.dtype),
            static_cast<std::uint32_t>(call_.factor.has_value() ? ncclNumOps : call_.op),
            static_cast<std::uint32_t>(call_.root)};
  }

  const void* piece(const void* pieces, int index) const {
    return static_cast<const char*>(pieces) + static_cast<std::size_t>(index) * piece_bytes_;
  }

  char* stage(std::size_t num_bytes) {
    task_.staging.emplace_back(new char[num_bytes]);
    return task_.staging.back().get();
  }

  const Call& call_;
  const int rank_;
  const int num_ranks_;
  const std::size_t piece_bytes_;
  const bool is_root_;
  Task task_;
};

}  // namespace

Task plan(const Call& call, int rank, int num_ranks) {
  return Planner(call, rank, num_ranks).plan();
}

}  // namespace fake_nccl
