#pragma once

#include <Python.h>

namespace tritondt {

// A Python function split(args, static_argnum) for calls with instances of `tensor_class`, which
// keeps `_spec` and `_local_tensor` in slots. It gives (key, local_args): what tells signatures
// apart, and the arguments with local tensors in place; or None where an argument is of a kind that
// only the caller's general way knows. Null, with a Python error set, where the class has no slots.
PyObject* make_call_splitter(PyTypeObject* tensor_class);

}  // namespace tritondt
