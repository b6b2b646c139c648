#include "bindings/arenas.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/outcomes.h"
#include "boxes/strided_copy.h"
#include "boxes/strided_reduce.h"
#include "transport/arena.h"
#include "transport/arena_group.h"

namespace py = pybind11;

namespace tritondt {
namespace {

// As tritondt.comm.packing.arena_transfer writes it: (peer, offset, bytes).
using SlotMessageFields = std::tuple<std::size_t, std::uint64_t, std::uint64_t>;

std::vector<SlotMessage> make_slot_messages(const std::vector<SlotMessageFields>& fields) {
  std::vector<SlotMessage> messages;
  messages.reserve(fields.size());
  for (const auto& [peer, offset, num_bytes] : fields)
    messages.push_back({peer, offset, num_bytes});
  return messages;
}

// The tables are kept by the round's Python object.
template <typename Table>
ArenaRound::Run run_of(const Table* table) {
  if (table == nullptr) return {};
  return [table](const Addresses& sources, const Addresses& targets, int num_threads) {
    table->run(sources, targets, num_threads);
  };
}

ArenaRound make_round(const std::vector<SlotMessageFields>& sends,
                      const std::vector<SlotMessageFields>& receives, const CopyTable* pack,
                      const CopyTable* keep, const CopyTable* unpack,
                      const std::vector<const ReduceTable*>& reduces) {
  std::vector<ArenaRound::Run> reducing;
  for (const ReduceTable* table : reduces) reducing.push_back(run_of(table));
  return {make_slot_messages(sends),
          make_slot_messages(receives),
          run_of(pack),
          run_of(keep),
          run_of(unpack),
          std::move(reducing)};
}

// For tests: the plan with a call to Python before a step of its first round.
std::unique_ptr<ArenaPlan> observed(const ArenaPlan& plan, const std::string& step,
                                    py::function call) {
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
  py::class_<ArenaRound>(*module, "ArenaRound",
                         "What a round of an exchange of boxes packs, sends and unpacks.")
      .def(py::init(&make_round), py::kw_only(), py::arg("sends"), py::arg("receives"),
           py::arg("pack").none(true), py::arg("keep").none(true), py::arg("unpack").none(true),
           py::arg("reduces"), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(),
           py::keep_alive<1, 6>(), py::keep_alive<1, 7>());
  py::class_<ArenaPlan, ArenaProgram>(
      *module, "ArenaPlan", "One rank's side of an exchange of boxes through arenas, by tables.")
      .def(py::init([](const py::tuple& rounds) {
             return std::make_unique<ArenaPlan>(rounds.cast<std::vector<ArenaRound>>());
           }),
           py::arg("rounds"), py::keep_alive<1, 2>())
      .def("observed", &observed, py::arg("step"), py::arg("call"), py::keep_alive<0, 1>(),
           "For tests: the plan with a call before pack, keep or unpack of its first round.");
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
      .def("release", &ArenaGroup::release, "Unmaps all arenas; not while an exchange runs.")
      .def("time_steps", &ArenaGroup::time_steps, py::arg("is_on"),
           "Notes from now on when steps of rounds run, or no more.")
      .def(
          "take_steps",
          [](ArenaGroup& group) {
            std::vector<std::tuple<const char*, std::int64_t, std::int64_t>> steps;
            for (const auto& [kind, started_ns, ended_ns] : group.take_steps()) {
              steps.emplace_back(kind, started_ns, ended_ns);
            }
            return steps;
          },
          "(kind, start, end) of the steps noted since the last call, in ns of CLOCK_MONOTONIC.");
}

}  // namespace tritondt
