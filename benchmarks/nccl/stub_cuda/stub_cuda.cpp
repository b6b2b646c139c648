// A libcuda.so.1 whose calls take as long as CUDA's take the host, and do nothing; Triton's
// launcher calls it as the driver. It is a module of Python too, with what torch's extension has
// around the driver: events, the current stream, the allocator. A call's time is spent in a loop,
// as in the driver, and set by `set_costs`.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

namespace {

enum Call {
  kLaunch,
  kPointerAttribute,
  kEventRecord,
  kStreamWaitEvent,
  kEventQuery,
  kIsCapturing,
  kAllocation,
  kNumCalls
};
constexpr const char* kNames[kNumCalls] = {
    "launch",      "pointer_attribute", "event_record", "stream_wait_event",
    "event_query", "is_capturing",      "allocation"};

std::atomic<std::int64_t> costs_ns[kNumCalls];
std::atomic<std::int64_t> counts[kNumCalls];
std::atomic<std::uint64_t> num_streams{0};
thread_local std::uint64_t current_stream = 0;
// torch.empty, and what makes a tensor of lengths, strides and a dtype.
PyObject* real_empty[2] = {nullptr, nullptr};

CUresult pay(Call call) {
  using Clock = std::chrono::steady_clock;
  counts[call].fetch_add(1, std::memory_order_relaxed);
  const std::int64_t cost = costs_ns[call].load(std::memory_order_relaxed);
  if (cost > 0) {
    const auto ends_at = Clock::now() + std::chrono::nanoseconds(cost);
    while (Clock::now() < ends_at) {
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) {
  return pay(kLaunch);
}
CUresult cuPointerGetAttribute(void*, CUpointer_attribute, CUdeviceptr) {
  return pay(kPointerAttribute);
}
CUresult cuEventRecord(CUevent, CUstream) { return pay(kEventRecord); }
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return pay(kStreamWaitEvent); }
CUresult cuEventQuery(CUevent) { return pay(kEventQuery); }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return pay(kIsCapturing);
}

// What runs once: contexts, modules, streams. It takes no time.
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "no error";
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {  // an H100's
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = 232448;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 132;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    default:
      *value = 65536;
  }
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { return cuDeviceGet(device, 0); }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = reinterpret_cast<CUmodule>(1);
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  *function = reinterpret_cast<CUfunction>(1);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(std::size_t* value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, std::size_t) { return CUDA_SUCCESS; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }

}  // extern "C"

namespace {

using Arguments = PyObject* const*;

PyObject* event_record(PyObject*, Arguments, Py_ssize_t) {
  cuEventRecord(nullptr, nullptr);
  Py_RETURN_NONE;
}
PyObject* event_wait(PyObject*, Arguments, Py_ssize_t) {
  cuStreamWaitEvent(nullptr, nullptr, 0);
  Py_RETURN_NONE;
}
PyObject* event_query(PyObject*, Arguments, Py_ssize_t) {
  return PyBool_FromLong(cuEventQuery(nullptr) == CUDA_SUCCESS);
}
PyObject* is_capturing(PyObject*, PyObject*) {
  CUstreamCaptureStatus status;
  cuStreamIsCapturing(nullptr, &status);
  return PyBool_FromLong(status != CU_STREAM_CAPTURE_STATUS_NONE);
}
PyObject* new_stream(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(++num_streams); }
PyObject* raw_stream(PyObject*, Arguments, Py_ssize_t) {
  return PyLong_FromUnsignedLongLong(current_stream);
}
PyObject* set_stream(PyObject*, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"stream_id", "device_index", "device_type", nullptr};
  unsigned long long handle;
  PyObject *index, *type;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "KOO", const_cast<char**>(names), &handle,
                                   &index, &type))
    return nullptr;
  current_stream = handle;
  Py_RETURN_NONE;
}
PyObject* device_number(PyObject*, PyObject*) { return PyLong_FromLong(0); }

// Either of these, with the time that the allocator of CUDA's memory takes to give a block and to
// take it back.
template <int which>
PyObject* empty(PyObject*, Arguments arguments, Py_ssize_t count, PyObject* names) {
  pay(kAllocation);
  return PyObject_Vectorcall(real_empty[which], arguments, static_cast<std::size_t>(count), names);
}
PyObject* set_empty(PyObject*, Arguments functions, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "set_empty takes 2 functions");
  for (int which = 0; which < 2; ++which) {
    Py_INCREF(functions[which]);
    Py_XSETREF(real_empty[which], functions[which]);
  }
  Py_RETURN_NONE;
}

PyObject* set_costs(PyObject*, PyObject* given) {
  for (int call = 0; call < kNumCalls; ++call) {
    PyObject* cost = PyDict_GetItemString(given, kNames[call]);
    if (cost == nullptr)
      return PyErr_Format(PyExc_KeyError, "no cost of %s, in nanoseconds", kNames[call]);
    const long long value = PyLong_AsLongLong(cost);
    if (PyErr_Occurred() != nullptr) return nullptr;
    costs_ns[call] = value;
  }
  Py_RETURN_NONE;
}
PyObject* take_counts(PyObject*, PyObject*) {
  PyObject* found = PyDict_New();
  for (int call = 0; found != nullptr && call < kNumCalls; ++call) {
    PyObject* count = PyLong_FromLongLong(counts[call].exchange(0));
    PyDict_SetItemString(found, kNames[call], count);
    Py_XDECREF(count);
  }
  return found;
}

template <typename Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"event_record", as_method(event_record), METH_FASTCALL, nullptr},
    {"event_wait", as_method(event_wait), METH_FASTCALL, nullptr},
    {"event_query", as_method(event_query), METH_FASTCALL, nullptr},
    {"is_capturing", is_capturing, METH_NOARGS, nullptr},
    {"new_stream", new_stream, METH_NOARGS, nullptr},
    {"raw_stream", as_method(raw_stream), METH_FASTCALL, nullptr},
    {"set_stream", as_method(set_stream), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"device_number", device_number, METH_NOARGS, nullptr},
    {"empty", as_method(empty<0>), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"empty_strided", as_method(empty<1>), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"set_empty", as_method(set_empty), METH_FASTCALL, nullptr},
    {"set_costs", set_costs, METH_O, nullptr},
    {"take_counts", take_counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "stub_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_stub_cuda() { return PyModule_Create(&module); }
