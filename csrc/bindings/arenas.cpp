#include "bindings/arenas.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/outcomes.h"
#include "transport/arena.h"
#include "transport/arena_group.h"
#include "transport/box_moves.h"

namespace py = pybind11;

namespace tritondt {
namespace {

// As tritondt.comm.packing.arena_transfer writes them.
using Integers = std::vector<std::int64_t>;
using PlaceFields = std::pair<std::int64_t, Integers>;              // offset, strides
using JointFields = std::pair<Integers, std::vector<PlaceFields>>;  // lengths, storages
using PartFields = std::tuple<std::size_t, Integers, std::vector<JointFields>>;  // and the tensor
using TermFields = std::pair<std::size_t, std::int64_t>;                     // part, contribution
using ReductionFields = std::tuple<std::string, std::string, std::int64_t>;  // dtype, op, divisor
using BoxFields = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                             Integers, Integers, Integers>;  // as CopyBox

std::vector<BoxPart> make_parts(const std::vector<PartFields>& fields) {
  std::vector<BoxPart> parts;
  for (const auto& [tensor, lengths, joints] : fields) {
    BoxPart part = {tensor, lengths, {}};
    for (const auto& [of_box, storages] : joints) {
      JointBox box = {of_box, {}};
      for (const auto& [offset, strides] : storages) box.places.push_back({offset, strides});
      part.boxes.push_back(std::move(box));
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<BoxTerm> make_terms(const std::vector<TermFields>& fields) {
  std::vector<BoxTerm> terms;
  for (const auto& [part, contribution] : fields) terms.push_back({part, contribution});
  return terms;
}

std::unique_ptr<BoxMoves> make_box_moves(
    std::size_t num_ranks, std::uint64_t chunk_bytes, const Integers& itemsizes,
    const std::vector<std::optional<ReductionFields>>& reductions,
    const std::vector<PartFields>& leaving, const std::vector<PartFields>& arriving,
    const std::vector<std::pair<std::size_t, std::vector<std::size_t>>>& sends,
    const std::vector<std::pair<std::size_t, std::vector<TermFields>>>& receives,
    const std::vector<TermFields>& own_terms, const std::vector<BoxFields>& keeps,
    bool is_past_cache) {
  BoxExchange exchange;
  exchange.num_ranks = num_ranks;
  exchange.chunk_bytes = chunk_bytes;
  exchange.itemsizes = itemsizes;
  for (const std::optional<ReductionFields>& found : reductions) {
    exchange.reductions.emplace_back();
    if (found) {
      const auto& [dtype, op, divisor] = *found;
      exchange.reductions.back() = BoxReduction{dtype, op, divisor};
    }
  }
  exchange.leaving = make_parts(leaving);
  exchange.arriving = make_parts(arriving);
  exchange.sends = sends;
  for (const auto& [peer, terms] : receives) {
    exchange.receives.emplace_back(peer, make_terms(terms));
  }
  exchange.own_terms = make_terms(own_terms);
  for (const auto& [source, target, source_offset, target_offset, itemsize, lengths, source_strides,
                    target_strides] : keeps) {
    exchange.keeps.push_back({source, target, source_offset, target_offset, itemsize, lengths,
                              source_strides, target_strides});
  }
  exchange.is_past_cache = is_past_cache;
  return std::make_unique<BoxMoves>(exchange);
}

// For tests: the plan with a call to Python before a step of its first round.
std::unique_ptr<ArenaPlan> observed(const ArenaPlan& plan, const std::string& step,
                                    py::function call) {
  if (plan.rounds.empty()) throw std::invalid_argument("the plan has no round");
  auto made = std::make_unique<ArenaPlan>(plan);
  ArenaRound& first = made->rounds.at(0);
  ArenaRound::Run* const found = step == "pack"     ? &first.pack
                                 : step == "keep"   ? &first.keep
                                 : step == "unpack" ? &first.unpack
                                                    : nullptr;
  if (found == nullptr) {
    throw std::invalid_argument("step '" + step + "'; allowed are pack, keep and unpack");
  }
  // What is kept in a copy of the function is let go of by whoever holds the GIL: the plan's end.
  auto kept =
      std::shared_ptr<py::function>(new py::function(std::move(call)), [](py::function* it) {
        const py::gil_scoped_acquire acquired;
        delete it;
      });
  *found = [kept, run = *found](const Addresses& sources, const Addresses& targets,
                                int num_threads) {
    {
      const py::gil_scoped_acquire acquired;
      (*kept)();
    }
    if (run) run(sources, targets, num_threads);
  };
  return made;
}

// Keeps a Python object, which is let go of with the GIL held, from wherever that happens.
std::shared_ptr<const void> kept(const py::object& object) {
  return std::shared_ptr<py::object>(new py::object(object), [](py::object* it) {
    const py::gil_scoped_acquire acquired;
    delete it;
  });
}

// How a part of an exchange ended, which runs without the GIL. While the exchange is under way the
// group keeps its `plan`, with all that this keeps alive, and lets go of it afterwards.
template <typename Run>
auto ended(ArenaGroup* group, const py::object* plan, const Run& run) {
  Ending ending = {};
  try {
    const py::gil_scoped_release released;
    ending = run();
  } catch (...) {
    if (plan != nullptr && group->is_under_way()) group->keep(kept(*plan));
    throw;
  }
  if (ending.outcome != Outcome::kPending) {
    group->keep(nullptr);
  } else if (plan != nullptr) {
    group->keep(kept(*plan));
  }
  return ending_of(ending);
}

void bind_arena(py::module_* module) {
  py::class_<Arena, std::shared_ptr<Arena>>(
      *module, "Arena", "Shared memory without a name, made by one rank and mapped by others.")
      .def(py::init<std::size_t>(), py::arg("num_bytes"))
      .def(py::init<const std::string&, std::size_t>(), py::arg("path"), py::arg("num_bytes"),
           "The memory of another process, by the path of its descriptor in /proc.")
      .def_property_readonly("descriptor", &Arena::descriptor)
      .def_property_readonly("num_bytes", &Arena::num_bytes)
      .def("close_descriptor", &Arena::close_descriptor);
}

void bind_plan(py::module_* module) {
  py::class_<ArenaProgram>(*module, "ArenaProgram",
                           "One rank's side of an exchange through arenas, round by round.")
      .def_property_readonly("num_rounds", &ArenaProgram::num_rounds);
  py::class_<ArenaPlan, ArenaProgram>(*module, "ArenaPlan", "Rounds of an exchange, by tables.")
      .def("observed", &observed, py::arg("step"), py::arg("call"),
           "For tests: the plan with a call before pack, keep or unpack of its first round.");
  py::class_<BoxMoves, ArenaPlan>(
      *module, "BoxMoves", "Boxes of ranks' tensors for others, a chunk of each message a round.")
      .def(py::init(&make_box_moves), py::kw_only(), py::arg("num_ranks"), py::arg("chunk_bytes"),
           py::arg("itemsizes"), py::arg("reductions"), py::arg("leaving"), py::arg("arriving"),
           py::arg("sends"), py::arg("receives"), py::arg("own_terms"), py::arg("keeps"),
           py::arg("is_past_cache"))
      .def_property_readonly("staged_bytes", &BoxMoves::staged_bytes);
}

}  // namespace

void bind_arena_group(py::module_* module) {
  bind_arena(module);
  bind_plan(module);
  py::class_<ArenaGroup, TimedExchange, std::shared_ptr<ArenaGroup>>(
      *module, "ArenaGroup", "Ranks of one machine that read messages in each other's memory.")
      .def(py::init<std::size_t, std::vector<std::shared_ptr<Arena>>, std::shared_ptr<SocketGroup>,
                    std::vector<int>, int>(),
           py::arg("place"), py::arg("arenas"), py::arg("group").none(false), py::arg("sockets"),
           py::arg("num_spins"))
      .def("connect", &ArenaGroup::connect, py::arg("peer"), py::arg("socket"),
           "The connection to a peer, before the first exchange with it.")
      .def_static("slot_bytes", &ArenaGroup::slot_bytes, py::arg("arena_bytes"),
                  py::arg("num_ranks"), "Bytes of a slot in an arena of so many bytes.")
      .def(
          "run",
          [](ArenaGroup& group, const py::object& plan, Addresses sources, Addresses targets,
             int num_threads, std::uint64_t sequence, std::uint64_t tag, std::uintptr_t staging) {
            const auto* const program = plan.cast<const ArenaProgram*>();
            if (program == nullptr) throw py::type_error("the plan of an exchange is None");
            return ended(&group, &plan, [&] {
              return group.run(program,
                               {std::move(sources), std::move(targets), num_threads, staging},
                               sequence, tag);
            });
          },
          py::arg("plan"), py::arg("sources"), py::arg("targets"), py::arg("num_threads"),
          py::arg("sequence"), py::arg("tag"), py::arg("staging"),
          "Runs an exchange to its end; PENDING means call finish.")
      .def(
          "finish",
          [](ArenaGroup& group) {
            return ended(&group, nullptr, [&group] { return group.finish(); });
          },
          "Carries on until all messages are read; PENDING means call again.")
      .def("skip", &ArenaGroup::skip, py::arg("sequence"),
           "Tells all that this rank reads no message of an exchange, nor of any before.")
      .def("interrupt", &ArenaGroup::interrupt,
           "Makes the running exchange, or the next one that waits, end INTERRUPTED.")
      .def("release", &ArenaGroup::release, "Unmaps all arenas; not while an exchange runs.");
}

}  // namespace tritondt
