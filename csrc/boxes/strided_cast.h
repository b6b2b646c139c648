#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "boxes/cast_kernels.h"
#include "boxes/sweep.h"

namespace tritondt {

// As tritondt.kernels.boxes.CastBox: offsets and strides in elements of either side's dtype.
struct CastBox {
  std::int64_t source;
  std::int64_t target;
  std::int64_t source_offset;
  std::int64_t target_offset;
  std::vector<std::int64_t> lengths;
  std::vector<std::int64_t> source_strides;
  std::vector<std::int64_t> target_strides;
};

struct CastPiece : Piece {
  std::size_t box;  // its position in the list that the table was made of
  bool is_transposed;
};

// What tables of casts have in common: boxes, prepared once and run many times.
class CastBoxes {
 public:
  // Throws std::invalid_argument for a box that cannot exist and for dtypes that the verb does not
  // know; drops empty boxes.
  CastBoxes(CastVerb verb, const std::vector<CastBox>& boxes, const std::string& source_dtype,
            const std::string& target_dtype);

  // Bytes of the wider side.
  std::int64_t num_bytes() const { return num_bytes_; }
  std::size_t num_boxes() const { return pieces_.size(); }
  // Loops around an element, the most of any box; at most 1 when every box is contiguous.
  std::size_t num_dims() const { return num_dims_; }

 protected:
  void check(const Pointers& sources, const Pointers& targets) const;
  // Every box times its factor: `factors` is as long as the list of boxes, or empty for 1.
  void cast(const Pointers& sources, const Pointers& targets, const std::vector<float>& factors,
            int num_threads) const;
  // The bits of the largest finite magnitude of every box.
  std::vector<std::uint32_t> largest_magnitudes(const Pointers& sources, const Pointers& targets,
                                                int num_threads) const;

  CastKernel kernel_;
  std::size_t num_given_boxes_;  // empty ones too

 private:
  std::vector<CastPiece> pieces_;
  std::vector<Sweep> sweeps_;
  std::int64_t num_bytes_ = 0;
  std::size_t num_dims_ = 0;
};

// Between two floating-point dtypes.
class CastTable : public CastBoxes {
 public:
  CastTable(const std::vector<CastBox>& boxes, const std::string& source_dtype,
            const std::string& target_dtype)
      : CastBoxes(CastVerb::kCast, boxes, source_dtype, target_dtype) {}

  // As CopyTable::run; pointers are aligned to their dtypes.
  void run(const std::vector<std::uintptr_t>& sources, const std::vector<std::uintptr_t>& targets,
           int num_threads) const;
};

// To 8 bits. `scales`, one float32 per box, empty ones too, is written.
class QuantizeTable : public CastBoxes {
 public:
  QuantizeTable(const std::vector<CastBox>& boxes, const std::string& source_dtype,
                const std::string& target_dtype)
      : CastBoxes(CastVerb::kQuantize, boxes, source_dtype, target_dtype) {}

  void run(const std::vector<std::uintptr_t>& sources, const std::vector<std::uintptr_t>& targets,
           std::uintptr_t scales, int num_threads) const;
};

// And back. `scales` is read.
class DequantizeTable : public CastBoxes {
 public:
  DequantizeTable(const std::vector<CastBox>& boxes, const std::string& source_dtype,
                  const std::string& target_dtype)
      : CastBoxes(CastVerb::kDequantize, boxes, source_dtype, target_dtype) {}

  void run(const std::vector<std::uintptr_t>& sources, const std::vector<std::uintptr_t>& targets,
           std::uintptr_t scales, int num_threads) const;
};

}  // namespace tritondt
