#include "flight/call_site.h"

#include <algorithm>
#include <string_view>

namespace tritondt {
namespace {

// Programs that make code as they run would otherwise have it kept for ever.
constexpr std::size_t kMaxCodes = 4096;

// Where the frame is in its code; cheaper than its line, which has to be decoded.
int instruction_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return frame->f_lasti;
#endif
}

}  // namespace

void CallSites::set_internal(std::vector<std::string> prefixes) {
  internal_ = std::move(prefixes);
  forget();
}

void CallSites::forget() {
  const std::unordered_map<PyCodeObject*, Code> codes = std::exchange(codes_, {});
  for (const auto& [code, known] : codes) Py_DECREF(code);
}

CallSites::Code* CallSites::known(PyCodeObject* code) {
  const auto found = codes_.find(code);
  if (found != codes_.end()) return &found->second;
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (file == nullptr) return nullptr;
  const bool is_internal =
      std::any_of(internal_.begin(), internal_.end(), [file](const std::string& prefix) {
        return std::string_view(file).substr(0, prefix.size()) == prefix;
      });
  if (codes_.size() >= kMaxCodes) forget();
  Py_INCREF(code);
  return &codes_.emplace(code, Code{is_internal, {}}).first->second;
}

std::int32_t CallSites::site_in(Code* known, PyCodeObject* code, PyFrameObject* frame) {
  const int instruction = instruction_of(frame);
  for (const auto& [place, number] : known->sites) {
    if (place == instruction) return number;
  }
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  const char* function = PyUnicode_AsUTF8(code->co_name);
  if (file == nullptr || function == nullptr) return -1;
  const std::string text = std::string(file) + ":" + std::to_string(PyFrame_GetLineNumber(frame)) +
                           " (" + function + ")";
  const std::int32_t number = texts_->number(text);
  known->sites.emplace_back(instruction, number);
  return number;
}

std::int32_t CallSites::find() {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  std::int32_t number = -1;
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    Code* found = known(code);
    const bool is_last = found == nullptr || !found->is_internal;
    if (found != nullptr && is_last) number = site_in(found, code, frame);
    Py_DECREF(code);
    PyFrameObject* back = is_last ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  return number;
}

}  // namespace tritondt
