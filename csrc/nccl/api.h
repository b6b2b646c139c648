#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "nccl/error.h"
#include "nccl/types.h"

namespace tritondt::nccl {

// How a library was found: at a path that was asked for, in the process already, or at the path of
// the installed package.
enum class Origin { kExplicit, kLoaded, kInstalled };

// A libnccl.so.2 in this process. It is never unloaded: NCCL has threads of its own.
class Library {
 public:
  // The library at `explicit_path` and no other, where there is one; else the copy that is loaded,
  // wherever it lies; else the one at `installed_path`. An empty path is none. Throws Error, also
  // for one older than kOldestVersion.
  Library(const std::string& explicit_path, const std::string& installed_path);

  const std::string& path() const { return path_; }
  Origin origin() const { return origin_; }
  int version() const { return version_; }
  // "NCCL 2.32.3 (/usr/lib/libnccl.so.2)".
  std::string description() const;
  // The address of a function, null where the library has none of this name.
  void* find(const char* name) const;

 private:
  void* handle_;
  Origin origin_;
  std::string path_;
  int version_ = 0;
};

// A function's name, the version that brought it, and whether a library has it.
struct Symbol {
  const char* name;
  int since;
  bool is_there;
};

// The functions that are looked for in a library, in the order in which they are.
struct Symbols {
  const Library library;
  std::vector<Symbol> all = {};
};

template <typename Signature>
class Function;

// One function of NCCL, looked up once.
template <typename Result, typename... Parameters>
class Function<Result(Parameters...)> {
 public:
  using Signature = Result(Parameters...);

  Function(Symbols& symbols, const char* name, int since)
      : library_(symbols.library),
        name_(name),
        since_(since),
        address_(reinterpret_cast<Signature*>(symbols.library.find(name))) {
    symbols.all.push_back({name, since, is_there()});
  }

  const char* name() const { return name_; }
  bool is_there() const { return address_ != nullptr; }

  // Throws Unsupported where the library does not have it.
  void require() const {
    if (!is_there()) throw_unsupported(library_.description(), name_, since_);
  }

  Result operator()(Parameters... arguments) const {
    require();
    return address_(arguments...);
  }

 private:
  const Library& library_;
  const char* name_;
  int since_;
  Signature* address_;
};

// NCCL's functions by their own names, each with its type and the version that brought it.
class Api {
 public:
  Api(const std::string& explicit_path, const std::string& installed_path);
  Api(const Api&) = delete;
  Api& operator=(const Api&) = delete;

  const Library& library() const { return nccl_.library; }
  const std::vector<Symbol>& symbols() const { return nccl_.all; }

  // Throws Error, with what NCCL says about it, unless `result` is ncclSuccess or ncclInProgress.
  void check(ncclResult_t result, const char* function) const;

  // Calls and checks; false where NCCL goes on with it in the background.
  template <typename... Parameters, typename... Arguments>
  bool call(const Function<ncclResult_t(Parameters...)>& function, Arguments... arguments) const {
    const ncclResult_t result = function(arguments...);
    check(result, function.name());
    return result == ncclSuccess;
  }

 private:
  // These make the list below readable.
  using R = ncclResult_t;
  using Comm = ncclComm_t;
  using Dtype = ncclDataType_t;
  using Op = ncclRedOp_t;
  using Stream = cudaStream_t;
  using Window = ncclWindow_t;
  using Id = ncclUniqueId;
  using Config = ncclConfig_t;
  using CallConfig = const ncclCollConfig_t*;
  using In = const void*;
  using Out = void*;
  using Size = std::size_t;
  template <typename Signature>
  using F = Function<Signature>;

  Symbols nccl_;

 public:
  F<R(int*)> ncclGetVersion{nccl_, "ncclGetVersion", 20000};
  F<const char*(R)> ncclGetErrorString{nccl_, "ncclGetErrorString", 20000};
  F<const char*(Comm)> ncclGetLastError{nccl_, "ncclGetLastError", 21300};

  F<R(Id*)> ncclGetUniqueId{nccl_, "ncclGetUniqueId", 20000};
  F<R(Comm*, int, Id, int, Config*)> ncclCommInitRankConfig{nccl_, "ncclCommInitRankConfig", 21400};
  F<R(Comm*, int, int, int, Id*, Config*)> ncclCommInitRankScalable{
      nccl_, "ncclCommInitRankScalable", 22304};
  F<R(Comm, int, int, Comm*, Config*)> ncclCommSplit{nccl_, "ncclCommSplit", 21801};
  F<R(Comm, int*, int, Comm*, Config*, int)> ncclCommShrink{nccl_, "ncclCommShrink", 22703};
  F<R(Comm, Id*)> ncclCommGetUniqueId{nccl_, "ncclCommGetUniqueId", 22902};
  F<R(Comm, int, const Id*, int, Comm*, Config*)> ncclCommGrow{nccl_, "ncclCommGrow", 22902};
  F<R(Comm)> ncclCommFinalize{nccl_, "ncclCommFinalize", 21400};
  F<R(Comm)> ncclCommDestroy{nccl_, "ncclCommDestroy", 20000};
  F<R(Comm)> ncclCommAbort{nccl_, "ncclCommAbort", 20400};
  F<R(Comm, int)> ncclCommRevoke{nccl_, "ncclCommRevoke", 22807};
  F<R(Comm, R*)> ncclCommGetAsyncError{nccl_, "ncclCommGetAsyncError", 20400};
  F<R(Comm, int*)> ncclCommCount{nccl_, "ncclCommCount", 20000};
  F<R(Comm, int*)> ncclCommCuDevice{nccl_, "ncclCommCuDevice", 20000};
  F<R(Comm, int*)> ncclCommUserRank{nccl_, "ncclCommUserRank", 20000};

  F<R(Out*, Size)> ncclMemAlloc{nccl_, "ncclMemAlloc", 21901};
  F<R(Out)> ncclMemFree{nccl_, "ncclMemFree", 21901};
  F<R(Comm, Out, Size, Out*)> ncclCommRegister{nccl_, "ncclCommRegister", 21901};
  F<R(Comm, Out)> ncclCommDeregister{nccl_, "ncclCommDeregister", 21901};
  F<R(Comm, Out, Size, Window*, int)> ncclCommWindowRegister{nccl_, "ncclCommWindowRegister",
                                                             22703};
  F<R(Comm, Window)> ncclCommWindowDeregister{nccl_, "ncclCommWindowDeregister", 22703};

  F<R(Op*, Out, Dtype, ncclScalarResidence_t, Comm)> ncclRedOpCreatePreMulSum{
      nccl_, "ncclRedOpCreatePreMulSum", 21100};
  F<R(Op, Comm)> ncclRedOpDestroy{nccl_, "ncclRedOpDestroy", 21100};

  F<R()> ncclGroupStart{nccl_, "ncclGroupStart", 20000};
  F<R()> ncclGroupEnd{nccl_, "ncclGroupEnd", 20000};
  F<R(ncclSimInfo_t*)> ncclGroupSimulateEnd{nccl_, "ncclGroupSimulateEnd", 22203};

  F<R(In, Out, Size, Dtype, Comm, Stream)> ncclAllGather{nccl_, "ncclAllGather", 20000};
  F<R(In, Out, Size, Dtype, Op, Comm, Stream)> ncclReduceScatter{nccl_, "ncclReduceScatter", 20000};
  F<R(In, Out, Size, Dtype, Op, Comm, Stream)> ncclAllReduce{nccl_, "ncclAllReduce", 20000};
  F<R(In, Out, Size, Dtype, int, Comm, Stream)> ncclBroadcast{nccl_, "ncclBroadcast", 20200};
  F<R(In, Out, Size, Dtype, Op, int, Comm, Stream)> ncclReduce{nccl_, "ncclReduce", 20000};
  F<R(In, Out, Size, Dtype, Comm, Stream)> ncclAlltoAll{nccl_, "ncclAlltoAll", 22803};
  F<R(In, Out, Size, Dtype, int, Comm, Stream)> ncclGather{nccl_, "ncclGather", 22803};
  F<R(In, Out, Size, Dtype, int, Comm, Stream)> ncclScatter{nccl_, "ncclScatter", 22803};
  F<R(In, Size, Dtype, int, Comm, Stream)> ncclSend{nccl_, "ncclSend", 20700};
  F<R(Out, Size, Dtype, int, Comm, Stream)> ncclRecv{nccl_, "ncclRecv", 20700};

  F<R(In, Out, Size, Dtype, Comm, Stream, CallConfig)> ncclAllGatherConfig{
      nccl_, "ncclAllGatherConfig", 23102};
  F<R(In, Out, Size, Dtype, Op, Comm, Stream, CallConfig)> ncclReduceScatterConfig{
      nccl_, "ncclReduceScatterConfig", 23102};
  F<R(In, Out, Size, Dtype, Op, Comm, Stream, CallConfig)> ncclAllReduceConfig{
      nccl_, "ncclAllReduceConfig", 23102};
  F<R(In, Out, Size, Dtype, int, Comm, Stream, CallConfig)> ncclBroadcastConfig{
      nccl_, "ncclBroadcastConfig", 23102};
  F<R(In, Out, Size, Dtype, Op, int, Comm, Stream, CallConfig)> ncclReduceConfig{
      nccl_, "ncclReduceConfig", 23102};
  F<R(In, Out, Size, Dtype, Comm, Stream, CallConfig)> ncclAlltoAllConfig{
      nccl_, "ncclAlltoAllConfig", 23102};
  F<R(In, Out, Size, Dtype, int, Comm, Stream, CallConfig)> ncclGatherConfig{
      nccl_, "ncclGatherConfig", 23102};
  F<R(In, Out, Size, Dtype, int, Comm, Stream, CallConfig)> ncclScatterConfig{
      nccl_, "ncclScatterConfig", 23102};

  F<R(Window, Size, int, Out*)> ncclGetPeerDevicePointer{nccl_, "ncclGetPeerDevicePointer", 22902};
  F<R(Window, Size, Out*)> ncclGetLsaMultimemDevicePointer{nccl_, "ncclGetLsaMultimemDevicePointer",
                                                           22902};
  F<R(In, Size, Dtype, int, Window, Size, int, int, unsigned int, Comm, Stream)> ncclPutSignal{
      nccl_, "ncclPutSignal", 22902};
  F<R(int, int, int, unsigned int, Comm, Stream)> ncclSignal{nccl_, "ncclSignal", 22902};
  F<R(int, ncclWaitSignalDesc_t*, Comm, Stream)> ncclWaitSignal{nccl_, "ncclWaitSignal", 22902};
};

}  // namespace tritondt::nccl
