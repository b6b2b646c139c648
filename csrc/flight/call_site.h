#pragma once

#include <Python.h>
#include <frameobject.h>  // 3.10 declares PyFrame_GetBack and f_lasti there, 3.11 in Python.h

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "flight/text_table.h"

namespace tritondt {

// Finds the line of Python that asked: the innermost frame that is not in internal files. What is
// known of a code object, and of a place in it, is kept; all calls hold the GIL.
class CallSites {
 public:
  explicit CallSites(TextTable* texts) : texts_(texts) {}
  ~CallSites() { forget(); }
  CallSites(const CallSites&) = delete;
  CallSites& operator=(const CallSites&) = delete;

  // File names that begin so are internal from now on.
  void set_internal(std::vector<std::string> prefixes);

  // The number of "file:line (function)" in the table of texts; -1 where every frame is internal,
  // and with a Python error set on an error.
  std::int32_t find();

 private:
  struct Code {
    bool is_internal;
    std::vector<std::pair<int, std::int32_t>> sites;  // instruction, number of the text
  };

  // Null, with a Python error set, for a file name that is no text.
  Code* known(PyCodeObject* code);
  std::int32_t site_in(Code* known, PyCodeObject* code, PyFrameObject* frame);
  void forget();

  TextTable* texts_;
  std::vector<std::string> internal_;
  std::unordered_map<PyCodeObject*, Code> codes_;  // holds references to its keys
};

}  // namespace tritondt
