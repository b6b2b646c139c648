#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <memory>

#include "flight/flight_recorder.h"

namespace tritondt {

// An operation in flight, as Python reads it; see tritondt/comm/nccl/stream_engine.py. Plain C
// types, for the host's time: each is made, asked and dropped for every operation.
struct InFlight {
  PyObject_HEAD PyObject *event, *stream, *caller, *held, *error;
  PyObject *text, *messages, *late, *engine;
  unsigned long long fingerprint;
  long long sequence, record, site;
  long long sent_bytes, received_bytes;
  double started, timeout_s;
  char waits_in_stream;  // whether to wait for it is to let the current stream wait, and no more
};

// The order of one communicator's calls in streams, and those that are watched.
struct StreamEngine {
  PyObject_HEAD PyObject *streams, *stream, *target, *passed;
  PyObject *latest, *end;     // the latest call's stream and its end
  PyObject *waiter, *waited;  // another stream that waits already, and for which end
  PyObject* on_late;          // told of watched operations that are over, where one was late
  long long sequence;         // of the latest operation that was numbered
  char is_capturing;
  std::shared_ptr<FlightRecorder>* recorder;
  std::deque<InFlight*>* under_way;
};

// A new operation; null, with a Python error set, where there is no memory. `text` is borrowed.
InFlight* new_in_flight(PyObject* text, unsigned long long fingerprint, long long site,
                        double timeout_s);

// Notes that an operation goes into the stream now.
void begin_in_flight(InFlight* operation, long long sequence, long long record);

// Watches an operation from now on, and lets go of those that are over; false on a Python error.
bool watch(StreamEngine* engine, InFlight* operation);

bool is_stream_engine(PyObject* object);

// The operation that `object` is; null, without a Python error, where it is none.
InFlight* as_in_flight(PyObject* object);

// The stream that a call goes into, borrowed; null on a Python error. `ready` may be null.
PyObject* begin(StreamEngine* engine, InFlight* operation, bool is_synchronous, PyObject* ready);

// Notes that `stream` has been given all of an operation; false on a Python error.
bool end(StreamEngine* engine, InFlight* operation, PyObject* stream);

// Lets the calling thread's current stream wait for an operation; false on a Python error.
bool wait_for(StreamEngine* engine, InFlight* operation);

// Adds InFlight and StreamEngine; after FlightRecorder.
void bind_stream_engine(pybind11::module_* module);

}  // namespace tritondt
