#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/messages.h"
#include "bindings/nccl.h"
#include "nccl/names.h"

namespace py = pybind11;

namespace tritondt {
namespace {

using nccl::Call;
using nccl::CallKind;
using nccl::Communicator;
using Config = const CallConfigHandle*;

// As Python writes them: (operation, source, target, count, dtype, op, peer), (address, count).
using CallFields = std::tuple<std::string, std::uintptr_t, std::uintptr_t, std::int64_t,
                              std::string, nccl::OpName, std::int64_t>;
using PartFields = std::pair<std::uintptr_t, std::int64_t>;
// A tensor by its number and bytes in it, and a call whose source and target are such.
using SpotFields = std::pair<std::size_t, std::uintptr_t>;
using CallSliceFields = std::tuple<std::string, SpotFields, SpotFields, std::int64_t, std::string,
                                   nccl::OpName, std::int64_t>;

nccl::Place place_of(Communicator& communicator) {
  const py::gil_scoped_release released;
  return communicator.place();
}

void issue(Communicator& communicator, const std::vector<Call>& calls, std::uintptr_t stream,
           Config config = nullptr) {
  const py::gil_scoped_release released;
  communicator.issue_all(calls, stream_at(stream),
                         config != nullptr ? &config->configuration : nullptr);
}

std::vector<Call> make_calls(const Communicator& communicator,
                             const std::vector<CallFields>& fields) {
  std::vector<Call> calls;
  calls.reserve(fields.size());
  for (const auto& [kind, source, target, count, dtype, op, peer] : fields) {
    calls.push_back({nccl::kind_of(kind), source, target, count,
                     nccl::dtype_of(dtype, communicator.library()), nccl::op_of(op), peer});
  }
  return calls;
}

nccl::CallSlices make_call_slices(const nccl::Api& api,
                                  const std::vector<CallSliceFields>& fields) {
  std::vector<nccl::CallSlice> slices;
  slices.reserve(fields.size());
  for (const auto& [kind, source, target, count, dtype, op, peer] : fields) {
    const Call call = {nccl::kind_of(kind),
                       source.second,
                       target.second,
                       count,
                       nccl::dtype_of(dtype, api.library()),
                       nccl::op_of(op),
                       peer};
    slices.push_back({call, source.first, target.first});
  }
  return nccl::CallSlices(std::move(slices));
}

nccl::Parts make_parts(const std::vector<PartFields>& fields) {
  nccl::Parts parts;
  parts.reserve(fields.size());
  for (const auto& [address, count] : fields) parts.push_back({address, count});
  return parts;
}

void def_plain(CommunicatorClass* type, const char* name, CallKind kind, const char* doc) {
  type->def(
      name,
      [kind](Communicator& self, std::uintptr_t source, std::uintptr_t target, std::int64_t count,
             const std::string& dtype, std::uintptr_t stream, Config config) {
        issue(self, {{kind, source, target, count, nccl::dtype_of(dtype, self.library())}}, stream,
              config);
      },
      py::arg("source"), py::arg("target"), py::arg("count"), py::arg("dtype"), py::arg("stream"),
      py::arg("config") = py::none(), doc);
}

void def_reducing(CommunicatorClass* type, const char* name, CallKind kind, const char* doc) {
  type->def(
      name,
      [kind](Communicator& self, std::uintptr_t source, std::uintptr_t target, std::int64_t count,
             const std::string& dtype, const nccl::OpName& op, std::uintptr_t stream,
             Config config) {
        issue(
            self,
            {{kind, source, target, count, nccl::dtype_of(dtype, self.library()), nccl::op_of(op)}},
            stream, config);
      },
      py::arg("source"), py::arg("target"), py::arg("count"), py::arg("dtype"), py::arg("op"),
      py::arg("stream"), py::arg("config") = py::none(), doc);
}

void def_rooted(CommunicatorClass* type, const char* name, CallKind kind, const char* doc) {
  type->def(
      name,
      [kind](Communicator& self, std::uintptr_t source, std::uintptr_t target, std::int64_t count,
             const std::string& dtype, std::int64_t root, std::uintptr_t stream, Config config) {
        issue(self,
              {{kind, source, target, count, nccl::dtype_of(dtype, self.library()), nccl::ncclSum,
                root}},
              stream, config);
      },
      py::arg("source"), py::arg("target"), py::arg("count"), py::arg("dtype"), py::arg("root"),
      py::arg("stream"), py::arg("config") = py::none(), doc);
}

void def_message(CommunicatorClass* type, const char* name, CallKind kind, const char* doc) {
  type->def(
      name,
      [kind](Communicator& self, std::uintptr_t address, std::int64_t count,
             const std::string& dtype, std::int64_t peer, std::uintptr_t stream) {
        issue(self,
              {{kind, address, address, count, nccl::dtype_of(dtype, self.library()), nccl::ncclSum,
                peer}},
              stream);
      },
      py::arg("address"), py::arg("count"), py::arg("dtype"), py::arg("peer"), py::arg("stream"),
      doc);
}

void bind_collectives(CommunicatorClass* type) {
  def_plain(type, "all_gather", CallKind::kAllGather,
            "`count` elements of every rank, end to end in the order of ranks, to all.");
  def_reducing(type, "reduce_scatter", CallKind::kReduceScatter,
               "The reduction of all sources, `count` elements of it to every rank.");
  def_reducing(type, "all_reduce", CallKind::kAllReduce,
               "The reduction of `count` elements, to all.");
  def_rooted(type, "broadcast", CallKind::kBroadcast, "`count` elements of `root`, to all.");
  type->def(
      "reduce",
      [](Communicator& self, std::uintptr_t source, std::uintptr_t target, std::int64_t count,
         const std::string& dtype, const nccl::OpName& op, std::int64_t root, std::uintptr_t stream,
         Config config) {
        issue(self,
              {{CallKind::kReduce, source, target, count, nccl::dtype_of(dtype, self.library()),
                nccl::op_of(op), root}},
              stream, config);
      },
      py::arg("source"), py::arg("target"), py::arg("count"), py::arg("dtype"), py::arg("op"),
      py::arg("root"), py::arg("stream"), py::arg("config") = py::none(),
      "The reduction of `count` elements, to `root`.");
  def_plain(type, "all_to_all", CallKind::kAllToAll,
            "`count` elements from every rank to every rank, end to end in the order of ranks.");
  def_rooted(type, "gather", CallKind::kGather, "`count` elements of every rank, to `root`.");
  def_rooted(type, "scatter", CallKind::kScatter, "`count` elements of `root` to every rank.");
  def_message(type, "send", CallKind::kSend, "Elements to a peer, which calls `recv`.");
  def_message(type, "recv", CallKind::kRecv, "Elements of a peer, which calls `send`.");
}

void bind_groups(CommunicatorClass* type) {
  type->def(
          "group",
          [](Communicator& self, const std::vector<CallFields>& calls, std::uintptr_t stream,
             Config config) { issue(self, make_calls(self, calls), stream, config); },
          py::arg("calls"), py::arg("stream"), py::arg("config") = py::none(),
          "Calls (operation, source, target, count, dtype, op, peer), started together.")
      .def(
          "run",
          [](Communicator& self, const nccl::CallSlices& calls,
             const std::vector<std::uintptr_t>& addresses,
             std::uintptr_t stream) { issue(self, calls.calls(addresses), stream); },
          py::arg("calls"), py::arg("addresses"), py::arg("stream"),
          "The calls of an operation, started together, on tensors at `addresses`.")
      .def(
          "simulate",
          [](Communicator& self, const std::vector<CallFields>& calls,
             std::uintptr_t stream) -> std::optional<float> {
            const std::vector<Call> made = make_calls(self, calls);
            const py::gil_scoped_release released;
            const float us = self.simulate(made, stream_at(stream));
            return us < 0 ? std::nullopt : std::optional<float>(us);
          },
          py::arg("calls"), py::arg("stream") = 0,
          "Microseconds that NCCL expects the last collective to take; None for sends and recvs.")
      .def(
          "exchange",
          [](Communicator& self, const std::vector<MessageFields>& sends,
             const std::vector<MessageFields>& receives, std::uintptr_t stream) {
            issue(self, nccl::exchange(make_messages(sends), make_messages(receives)), stream);
          },
          py::arg("sends"), py::arg("receives"), py::arg("stream"),
          "Messages (peer, address, bytes), started together.")
      .def(
          "exchange_slices",
          [](Communicator& self, const MessageSlices& sends,
             const std::vector<std::uintptr_t>& sources, std::uintptr_t send_buffer,
             const MessageSlices& receives, const std::vector<std::uintptr_t>& targets,
             std::uintptr_t receive_buffer, std::uintptr_t stream) {
            issue(self,
                  nccl::exchange(sends.messages(sources, send_buffer),
                                 receives.messages(targets, receive_buffer)),
                  stream);
          },
          py::arg("sends"), py::arg("sources"), py::arg("send_buffer"), py::arg("receives"),
          py::arg("targets"), py::arg("receive_buffer"), py::arg("stream"),
          "The same of slices of tensors at addresses, and of buffers.")
      .def(
          "all_gather_v",
          [](Communicator& self, std::uintptr_t source, const std::vector<PartFields>& targets,
             const std::string& dtype, std::uintptr_t stream) {
            issue(self,
                  nccl::all_gather_v(place_of(self), source, make_parts(targets),
                                     nccl::dtype_of(dtype, self.library())),
                  stream);
          },
          py::arg("source"), py::arg("targets"), py::arg("dtype"), py::arg("stream"),
          "Every rank's part, to all; `targets` are (address, count) by rank.")
      .def(
          "reduce_scatter_v",
          [](Communicator& self, const std::vector<PartFields>& sources, std::uintptr_t target,
             const std::string& dtype, const nccl::OpName& op, std::uintptr_t stream) {
            issue(self,
                  nccl::reduce_scatter_v(place_of(self), make_parts(sources), target,
                                         nccl::dtype_of(dtype, self.library()), nccl::op_of(op)),
                  stream);
          },
          py::arg("sources"), py::arg("target"), py::arg("dtype"), py::arg("op"), py::arg("stream"),
          "The reduction of every rank's part, each to its rank.")
      .def(
          "all_to_all_v",
          [](Communicator& self, const std::vector<PartFields>& sources,
             const std::vector<PartFields>& targets, const std::string& dtype,
             std::uintptr_t stream) {
            issue(self,
                  nccl::all_to_all_v(place_of(self), make_parts(sources), make_parts(targets),
                                     nccl::dtype_of(dtype, self.library())),
                  stream);
          },
          py::arg("sources"), py::arg("targets"), py::arg("dtype"), py::arg("stream"),
          "A part to every rank and one from every rank.")
      .def(
          "gather_v",
          [](Communicator& self, PartFields source, const std::vector<PartFields>& targets,
             const std::string& dtype, std::int64_t root, std::uintptr_t stream) {
            issue(self,
                  nccl::gather_v(place_of(self), {source.first, source.second}, make_parts(targets),
                                 nccl::dtype_of(dtype, self.library()), root),
                  stream);
          },
          py::arg("source"), py::arg("targets"), py::arg("dtype"), py::arg("root"),
          py::arg("stream"), "Every rank's part, to `root`; elsewhere `targets` is empty.")
      .def(
          "scatter_v",
          [](Communicator& self, const std::vector<PartFields>& sources, PartFields target,
             const std::string& dtype, std::int64_t root, std::uintptr_t stream) {
            issue(
                self,
                nccl::scatter_v(place_of(self), make_parts(sources), {target.first, target.second},
                                nccl::dtype_of(dtype, self.library()), root),
                stream);
          },
          py::arg("sources"), py::arg("target"), py::arg("dtype"), py::arg("root"),
          py::arg("stream"), "A part of `root` to every rank; elsewhere `sources` is empty.");
}

}  // namespace

void bind_nccl_calls(py::module_* module, CommunicatorClass* type) {
  py::class_<nccl::CallSlices>(*module, "NcclCalls", "The calls of an operation, by tensors.")
      .def(
          py::init(&make_call_slices), py::arg("library"), py::arg("calls"),
          "Calls (operation, (tensor, bytes), (tensor, bytes), count, dtype, op, peer): where they "
          "read and write, from the beginning of tensors by number.");
  bind_collectives(type);
  bind_groups(type);
}

}  // namespace tritondt
