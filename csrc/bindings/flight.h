#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flight/call_site.h"
#include "flight/flight_recorder.h"

namespace tritondt {

// What Python holds: the recorder, which a watchdog may hold longer, and the sites of the calls.
struct RecorderHandle {
  explicit RecorderHandle(std::shared_ptr<FlightRecorder> made)
      : recorder(std::move(made)), sites(&recorder->texts()) {}

  std::shared_ptr<FlightRecorder> recorder;
  CallSites sites;
};

// Lets those who listen to steps know that operation `number`, which begins on the calling thread,
// is the exchange of which `record` is what Python knows. With the GIL.
void tell_exchange(const std::shared_ptr<FlightRecorder>& recorder, std::int64_t number,
                   std::int64_t sequence, std::int32_t site, PyObject* record);

void bind_flight_recorder(pybind11::module_* module);

}  // namespace tritondt
