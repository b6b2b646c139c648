#include "bindings/collectives.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/bitwise.h"
#include "transport/byte_moves.h"
#include "transport/reductions.h"

namespace py = pybind11;

namespace tritondt {
namespace {

// As tritondt.process_group.collective writes it: (tensor, first byte, bytes).
using SpanFields = std::tuple<std::size_t, std::uint64_t, std::uint64_t>;
using PeerSpanFields = std::pair<std::size_t, SpanFields>;

Span make_span(const SpanFields& fields) {
  return {std::get<0>(fields), std::get<1>(fields), std::get<2>(fields)};
}

std::vector<Span> make_spans(const std::vector<SpanFields>& fields) {
  std::vector<Span> spans;
  for (const SpanFields& each : fields) spans.push_back(make_span(each));
  return spans;
}

std::vector<ByteMoves::PeerSpan> make_peer_spans(const std::vector<PeerSpanFields>& fields) {
  std::vector<ByteMoves::PeerSpan> spans;
  for (const auto& [peer, span] : fields) spans.emplace_back(peer, make_span(span));
  return spans;
}

Reducer make_reducer(const std::string& dtype, const std::string& op, std::int64_t divisor,
                     std::vector<std::size_t> places, std::size_t own, std::uint64_t chunk_bytes) {
  const ReduceKernel kernel = is_bitwise(op) && divisor == 1
                                  ? find_bitwise_kernel(dtype, op)
                                  : find_reduce_kernel(dtype, op, divisor);
  return {kernel, divisor, std::move(places), own, chunk_bytes};
}

}  // namespace

void bind_collectives(py::module_* module) {
  py::class_<ByteMoves, ArenaProgram>(
      *module, "ByteMoves", "Bytes of ranks' tensors for others, a chunk of each message a round.")
      .def(py::init([](std::uint64_t chunk_bytes, const std::vector<PeerSpanFields>& sends,
                       const std::vector<PeerSpanFields>& receives,
                       const std::vector<std::pair<SpanFields, SpanFields>>& keeps,
                       bool is_past_cache) {
             std::vector<ByteMoves::Kept> kept;
             for (const auto& [from, to] : keeps) kept.emplace_back(make_span(from), make_span(to));
             return std::make_unique<ByteMoves>(chunk_bytes, make_peer_spans(sends),
                                                make_peer_spans(receives), std::move(kept),
                                                is_past_cache);
           }),
           py::kw_only(), py::arg("chunk_bytes"), py::arg("sends"), py::arg("receives"),
           py::arg("keeps"), py::arg("is_past_cache"));
  py::class_<Reducer>(*module, "Reducer", "How terms of ranks are reduced, chunk by chunk.")
      .def(py::init(&make_reducer), py::kw_only(), py::arg("dtype"), py::arg("op"),
           py::arg("divisor"), py::arg("places"), py::arg("own"), py::arg("chunk_bytes"));
  py::class_<SpanReduction>(*module, "SpanReduction",
                            "Terms of one span, here and in a buffer, reduced to a target.")
      .def(py::init([](const Reducer& reducer, const SpanFields& source, const SpanFields& target,
                       std::uint64_t stride) {
             return std::make_unique<SpanReduction>(reducer, make_span(source), make_span(target),
                                                    stride);
           }),
           py::arg("reducer"), py::kw_only(), py::arg("source"), py::arg("target"),
           py::arg("stride"))
      .def_property_readonly("num_bytes", &SpanReduction::num_bytes)
      .def_property_readonly("num_boxes", [](const SpanReduction&) { return 1; })
      .def(
          "run",
          [](const SpanReduction& reduction, const Addresses& source_ptrs,
             const Addresses& target_ptrs, int) {
            const py::gil_scoped_release released;
            reduction.run(source_ptrs, target_ptrs);
          },
          py::arg("source_ptrs"), py::arg("target_ptrs"), py::arg("num_threads"));
  py::class_<OneShotReduction, ArenaProgram>(
      *module, "OneShotReduction", "A reduction whose terms are all read by all ranks, or by one.")
      .def(py::init([](const Reducer& reducer, const SpanFields& source, const SpanFields& target,
                       std::int64_t root) {
             return std::make_unique<OneShotReduction>(reducer, make_span(source),
                                                       make_span(target), root);
           }),
           py::arg("reducer"), py::kw_only(), py::arg("source"), py::arg("target"),
           py::arg("root"));
  py::class_<PiecewiseReduction, ArenaProgram>(
      *module, "PiecewiseReduction", "A reduction of a piece on each rank, and their gather.")
      .def(py::init([](const Reducer& reducer, const std::vector<SpanFields>& pieces,
                       const std::vector<SpanFields>& results, bool is_past_cache) {
             return std::make_unique<PiecewiseReduction>(reducer, make_spans(pieces),
                                                         make_spans(results), is_past_cache);
           }),
           py::arg("reducer"), py::kw_only(), py::arg("pieces"), py::arg("results"),
           py::arg("is_past_cache"));
}

}  // namespace tritondt
