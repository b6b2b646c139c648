#pragma once

#include <Python.h>
#include <structmember.h>

#include <cstddef>

namespace tritondt {

// A method of a class of Python's that is tried in C first, and is Python's where that gives
// nothing. torch's C++ looks for methods in Python and takes a builtin function for none, so that
// it is a type of its own.
struct PlainMethod {
  // A new reference, or null: with a Python error, or without one where `general` is to be called.
  using Try = PyObject* (*)(PlainMethod* self, PyObject* const* values, Py_ssize_t count);

  PyObject_HEAD PyObject* general;
  PyObject* details;  // what `attempt` goes by
  Try attempt;
  vectorcallfunc call;
};

// A new reference; null with a Python error. `details` is borrowed, and may be null.
PyObject* make_plain_method(PyObject* general, PyObject* details, PlainMethod::Try attempt);

// Before the first is made; false with a Python error.
bool make_plain_method_type();

}  // namespace tritondt
