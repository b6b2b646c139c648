#include "bindings/sockets.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/flight.h"
#include "bindings/messages.h"
#include "bindings/outcomes.h"
#include "flight/watchdog.h"
#include "transport/interfaces.h"
#include "transport/socket_group.h"

namespace py = pybind11;

namespace tritondt {
namespace {

// Refused where it is no length of time; infinity is one.
std::int64_t timeout_ns_of(double timeout_s) {
  if (!(timeout_s > 0)) {
    throw std::invalid_argument("a timeout of " + std::to_string(timeout_s) +
                                " s was asked for; it must be more than 0");
  }
  const double ns = timeout_s * 1e9;
  return ns < 9e18 ? static_cast<std::int64_t>(ns) : TimedExchange::kNoTimeout;
}

std::shared_ptr<FlightRecorder> recorder_of(const RecorderHandle* handle) {
  return handle == nullptr ? nullptr : handle->recorder;
}

}  // namespace

void bind_socket_group(py::module_* module) {
  module->def("interface_addresses", &interface_addresses,
              "Name and numeric address of every address of an interface that is up.");
  py::class_<MessageSlices>(*module, "MessageSlices",
                            "The messages of an exchange before it is known where tensors lie.")
      .def(py::init(&make_slices), py::arg("slices"));
  py::class_<TimedExchange, std::shared_ptr<TimedExchange>>(
      *module, "TimedExchange", "One exchange at a time, which a watchdog may end.")
      .def(
          "set_timeout",
          [](TimedExchange& group, double timeout_s) {
            group.set_timeout_ns(timeout_ns_of(timeout_s));
          },
          py::arg("timeout_s"),
          "How many seconds an exchange may take before a watchdog ends it; from any thread.");
  py::class_<SocketGroup, TimedExchange, std::shared_ptr<SocketGroup>>(
      *module, "SocketGroup", "Connected sockets to peers, driven by the thread that calls.")
      .def(py::init<std::vector<int>>(), py::arg("sockets"))
      .def("connect", &SocketGroup::connect, py::arg("peer"), py::arg("socket"),
           "The connection to a peer, before the first exchange with it.")
      .def(
          "start",
          [](SocketGroup& group, const std::vector<MessageFields>& sends,
             const std::vector<MessageFields>& receives, std::uint64_t tag) {
            const std::vector<Message> out = make_messages(sends);
            const std::vector<Message> in = make_messages(receives);
            const py::gil_scoped_release released;
            group.start(out, in, tag);
          },
          py::arg("sends"), py::arg("receives"), py::arg("tag"),
          "Begins an exchange of messages (peer, address, bytes) and sends what can be sent at "
          "once.")
      .def(
          "start_slices",
          [](SocketGroup& group, const MessageSlices& sends,
             const std::vector<std::uintptr_t>& sources, std::uintptr_t send_buffer,
             const MessageSlices& receives, const std::vector<std::uintptr_t>& targets,
             std::uintptr_t receive_buffer, std::uint64_t tag) {
            const std::vector<Message> out = sends.messages(sources, send_buffer);
            const std::vector<Message> in = receives.messages(targets, receive_buffer);
            const py::gil_scoped_release released;
            group.start(out, in, tag);
          },
          py::arg("sends"), py::arg("sources"), py::arg("send_buffer"), py::arg("receives"),
          py::arg("targets"), py::arg("receive_buffer"), py::arg("tag"),
          "The same of slices of tensors at addresses, and of buffers.")
      .def(
          "finish",
          [](SocketGroup& group) {
            Ending ending = {};
            {
              const py::gil_scoped_release released;
              ending = group.finish();
            }
            return ending_of(ending);
          },
          "Carries on until all messages are out and in; PENDING means call again.")
      .def("interrupt", &SocketGroup::interrupt,
           "Makes the running or the next finish return INTERRUPTED; from any thread.")
      .def("skip", &SocketGroup::skip, py::arg("number"),
           "Ends what is under way; drops what arrives of exchanges up to a number, which is in "
           "the tag's bits above 31.");
}

void bind_watchdog(py::module_* module) {
  py::class_<Watchdog>(*module, "Watchdog",
                       "Ends exchanges that take too long, from a thread that never needs the GIL.")
      .def(py::init<>())
      .def(
          "watch",
          [](Watchdog& watchdog, const std::shared_ptr<TimedExchange>& group, double timeout_s,
             const RecorderHandle* recorder, const std::string& path) {
            group->set_timeout_ns(timeout_ns_of(timeout_s));
            watchdog.watch(group, recorder_of(recorder), path);
          },
          py::arg("group").none(false), py::arg("timeout_s"), py::arg("recorder"), py::arg("path"),
          "Expires exchanges of `group` after `timeout_s` and then writes `recorder` to `path`.")
      .def(
          "unwatch",
          [](Watchdog& watchdog, const TimedExchange& group) { watchdog.unwatch(&group); },
          py::arg("group"), "Lets `group` take as long as it takes, from now on.")
      .def(
          "dump_on_signal",
          [](Watchdog& watchdog, int signum, const RecorderHandle& recorder,
             const std::string& path) {
            return watchdog.dump_on_signal(signum, recorder.recorder, path);
          },
          py::arg("signum"), py::arg("recorder"), py::arg("path"),
          "Writes `recorder` to `path` at every `signum`; False where the signal is in use.")
      .def("close", &Watchdog::close, py::call_guard<py::gil_scoped_release>(),
           "Gives signals back and ends the thread.");
}

}  // namespace tritondt
