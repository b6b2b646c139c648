#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "api/api.h"
#include "api/birth.h"
#include "engine/group.h"

// Communicators made of others: split, shrunk and grown.
namespace fake_nccl {
namespace {

using Handle = std::shared_ptr<Communicator>;

// Makes a communicator of `members`, ranks of the parent in their new order. `present` are those
// who call this, in the same order everywhere; the first member makes the id for all.
ncclResult_t join_members(Channel channel, Communicator* parent, Communicator* child,
                          const std::vector<int>& present, const std::vector<int>& members) {
  const auto stopped = [=] { return child->is_aborted(); };
  ncclUniqueId mine = {};
  const bool is_first = !members.empty() && members[0] == parent->rank();
  const ncclResult_t made = is_first ? make_id(&mine) : ncclSuccess;
  std::vector<ncclUniqueId> ids;
  const ncclResult_t agreed = parent->agree(channel, present, mine, &ids, stopped);
  if (made != ncclSuccess || agreed != ncclSuccess) return std::max(made, agreed);
  if (members.empty()) return ncclSuccess;
  const auto place_of = [](const std::vector<int>& ranks, int rank) {
    return std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  };
  const ncclUniqueId& id = ids[static_cast<std::size_t>(place_of(present, members[0]))];
  return child->join(
      id, static_cast<int>(members.size()), static_cast<int>(place_of(members, parent->rank())),
      [=] { return parent->is_aborted(); },
      [&](int rank) { return parent->loss_at(members[static_cast<std::size_t>(rank)], present); });
}

// Where a rank wants to be.
struct Wish {
  int color;
  int key;
};

ncclResult_t split(Communicator* parent, Communicator* child, Wish mine) {
  std::vector<Wish> wishes;
  const std::vector<int> all = parent->all_ranks();
  const ncclResult_t agreed =
      parent->agree(Channel::kControl, all, mine, &wishes, [=] { return child->is_aborted(); });
  if (agreed != ncclSuccess) return agreed;
  std::vector<int> members;
  for (const int rank : all) {
    if (mine.color != kNoColor && wishes[static_cast<std::size_t>(rank)].color == mine.color) {
      members.push_back(rank);
    }
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return wishes[static_cast<std::size_t>(a)].key < wishes[static_cast<std::size_t>(b)].key;
  });
  return join_members(Channel::kControl, parent, child, all, members);
}

// What existing ranks tell each other when a communicator grows: one of them has an id.
struct Invitation {
  bool is_there;
  ncclUniqueId id;
};

ncclResult_t grow(Communicator* parent, Communicator* child, const Invitation& mine,
                  int num_ranks) {
  std::vector<Invitation> all;
  const std::vector<int> present = parent->all_ranks();
  const ncclResult_t agreed =
      parent->agree(Channel::kControl, present, mine, &all, [=] { return child->is_aborted(); });
  if (agreed != ncclSuccess) return agreed;
  const auto is_there = [](const Invitation& each) { return each.is_there; };
  if (std::count_if(all.begin(), all.end(), is_there) != 1) {
    return failed(ncclInvalidUsage, "ncclCommGrow: exactly one existing rank gives the id");
  }
  const ncclUniqueId id = std::find_if(all.begin(), all.end(), is_there)->id;
  parent->with_possessions([](Possessions* possessions) { possessions->is_id_unused = false; });
  return child->join(
      id, num_ranks, parent->rank(), [=] { return parent->is_aborted(); },
      [&](int each) { return each < parent->num_ranks() ? parent->loss_at(each, present) : -1; });
}

// Who is left of the parent; what a shrink that failed has left between them is in the way of
// another.
ncclResult_t shrink(Communicator* parent, Communicator* child, const std::vector<int>& members) {
  const auto has_failed = [&](bool now) {
    return parent->with_possessions([now](Possessions* possessions) {
      return std::exchange(possessions->has_failed_to_shrink,
                           possessions->has_failed_to_shrink || now);
    });
  };
  if (has_failed(false)) {
    return failed(ncclInvalidUsage, "ncclCommShrink: a shrink of the communicator has failed");
  }
  const ncclResult_t result = join_members(Channel::kShrink, parent, child, members, members);
  has_failed(result != ncclSuccess);
  return result;
}

}  // namespace
}  // namespace fake_nccl

using namespace fake_nccl;

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                           ncclConfig_t* config) {
  const Function function = Function::ncclCommSplit;
  ncclResult_t result;
  const Handle parent = find_ready(comm, &result);
  if (parent == nullptr) return note(result);
  Birth birth(function, parent->config(), parent->device());
  const ncclResult_t refused = birth.refusal(made, config);
  if (refused != ncclSuccess) return note(refused);
  if (color < 0 && color != kNoColor) {
    return note(invalid(function, "color " + std::to_string(color)));
  }
  return note(birth.submit(
      made, parent, [=](Communicator* child) { return split(parent.get(), child, {color, key}); }));
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int num_excluded, ncclComm_t* made,
                            ncclConfig_t* config, int flags) {
  const Function function = Function::ncclCommShrink;
  const Handle parent = find_communicator(comm);
  if (parent == nullptr) return note(ncclInvalidArgument);
  // What has failed is shrunk by aborting what runs.
  const ncclResult_t ready = flags == kShrinkAbort ? ncclSuccess : parent->ready();
  if (ready != ncclSuccess) return note(ready);
  Birth birth(function, parent->config(), parent->device());
  const ncclResult_t refused = birth.refusal(made, config);
  if (refused != ncclSuccess) return note(refused);
  if (excluded == nullptr || num_excluded < 1 || num_excluded >= parent->num_ranks()) {
    return note(invalid(function, std::to_string(num_excluded) + " excluded ranks"));
  }
  std::vector<int> members;
  for (const int rank : parent->all_ranks()) {
    if (std::count(excluded, excluded + num_excluded, rank) == 0) members.push_back(rank);
  }
  if (std::count(members.begin(), members.end(), parent->rank()) == 0) {
    return note(invalid(function, "an excluded rank calls it"));
  }
  if (flags == kShrinkAbort) {
    parent->revoke();
    parent->wait_for_running();
  }
  return note(birth.submit(
      made, parent, [=](Communicator* child) { return shrink(parent.get(), child, members); }));
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  const Function function = Function::ncclCommGetUniqueId;
  const ncclResult_t entered = enter(function);
  if (entered != ncclSuccess) return entered;
  ncclResult_t result;
  const Handle found = find_ready(comm, &result);
  if (found == nullptr) return result;
  const bool is_unused = found->with_possessions(
      [](Possessions* possessions) { return std::exchange(possessions->is_id_unused, true); });
  if (!is_unused) return make_id(id);
  return failed(ncclInvalidUsage, "ncclCommGetUniqueId: the id made before is not used up");
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int num_ranks, const ncclUniqueId* id, int rank,
                          ncclComm_t* made, ncclConfig_t* config) {
  const Function function = Function::ncclCommGrow;
  if (comm == nullptr) {
    if (id == nullptr) return note(invalid(function, "a new rank has no id"));
    return note(create(function, made, num_ranks, *id, rank, config));
  }
  ncclResult_t result;
  const Handle parent = find_ready(comm, &result);
  if (parent == nullptr) return note(result);
  Birth birth(function, parent->config(), parent->device());
  const ncclResult_t refused = birth.refusal(made, config);
  if (refused != ncclSuccess) return note(refused);
  if (num_ranks <= parent->num_ranks() || rank != -1) {
    return note(invalid(function, "rank " + std::to_string(rank) + ", " +
                                      std::to_string(parent->num_ranks()) + " ranks to become " +
                                      std::to_string(num_ranks)));
  }
  const Invitation mine = {id != nullptr, id == nullptr ? ncclUniqueId{} : *id};
  return note(birth.submit(made, parent, [=](Communicator* child) {
    return grow(parent.get(), child, mine, num_ranks);
  }));
}
