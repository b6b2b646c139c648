#pragma once

#include <Python.h>

#include <cstdint>

// The C exchange API of DLPack 1, declared by hand: torch has it from 2.10 on, as an attribute of
// torch.Tensor. It tells where a tensor lies and how, without torch's headers and in a tenth of the
// time that attributes of Python take.
namespace tritondt::dlpack {

struct DLDevice {
  std::int32_t type, id;
};
struct DLDataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t num_dims;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct ExchangeApi {
  std::uint32_t major, minor;
  const ExchangeApi* previous;  // of an older major version, or null
  void *allocate, *from_object, *to_object;
  int (*view)(void* object, DLTensor* out);  // null where the library has none
  void* current_stream;
};

// The API of a class of tensors; null where it has none of version 1, or with a Python error.
inline const ExchangeApi* exchange_api_of(PyObject* tensor_class) {
  PyObject* capsule = PyObject_GetAttrString(tensor_class, "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) != 0) PyErr_Clear();
    return nullptr;
  }
  const ExchangeApi* api = nullptr;
  if (PyCapsule_CheckExact(capsule) != 0) {
    api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  }
  Py_DECREF(capsule);
  while (api != nullptr && api->major != 1) api = api->previous;
  return api == nullptr || api->view == nullptr ? nullptr : api;
}

}  // namespace tritondt::dlpack
