#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "nccl/api.h"
#include "nccl/communicator.h"
#include "nccl/config.h"

namespace tritondt {

// A configuration of calls needs a library to be laid out for, and Python a name for it.
struct CallConfigHandle {
  CallConfigHandle(const nccl::Library& library, const nccl::Options& options)
      : configuration(library, options) {}

  const nccl::CallConfiguration configuration;
};

using CommunicatorPtr = std::shared_ptr<nccl::Communicator>;
using CommunicatorClass = pybind11::class_<nccl::Communicator, CommunicatorPtr>;

// As Python holds it: dropped without the GIL, because an abort may take seconds.
CommunicatorPtr hold(nccl::Communicator::Ptr communicator);

inline nccl::cudaStream_t stream_at(std::uintptr_t stream) {
  return reinterpret_cast<nccl::cudaStream_t>(stream);
}

pybind11::bytes bytes_of(const nccl::ncclUniqueId& id);
nccl::ncclUniqueId id_of(const pybind11::bytes& bytes);

void bind_nccl(pybind11::module_* module);
void bind_nccl_communicator(pybind11::module_* module);
void bind_nccl_calls(pybind11::module_* module, CommunicatorClass* type);

}  // namespace tritondt
