// Tensor maps of matrices for the copy engine, encoded on the host at every
// launch (a map holds the address, which XLA changes between calls).
#ifndef JAX_W4A4_CUDA_TENSOR_MAP_H_
#define JAX_W4A4_CUDA_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_w4a4 {

// The driver's encoder, looked up once: the module does not link libcuda. Null
// with a driver before 12.0.
inline decltype(&cuTensorMapEncodeTiled) TensorMapEncoder() {
  static const auto encoder = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t code = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
    if (code != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      symbol = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(symbol);
  }();
  return encoder;
}

struct Matrix {
  const void* data;  // row-major, 16-byte aligned, pitch a multiple of 16 bytes
  int64_t rows, columns;
  CUtensorMapDataType type;
  int element_bytes;
  int64_t batch = 0;  // matrices one behind the other, a third dimension; 0: none
};

// Encodes maps until one is refused; `refused` then names it.
class TensorMaps {
 public:
  // Reads past the matrix are zeros, writes past it are dropped.
  void Encode(const char* name, CUtensorMap* map, const Matrix& matrix,
              int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
    if (refused_ != nullptr) return;
    const auto encoder = TensorMapEncoder();
    const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(matrix.columns),
                                 static_cast<cuuint64_t>(matrix.rows),
                                 static_cast<cuuint64_t>(matrix.batch)};
    const int64_t row = matrix.columns * matrix.element_bytes;
    const cuuint64_t pitch[2] = {static_cast<cuuint64_t>(row),
                                 static_cast<cuuint64_t>(row * matrix.rows)};
    const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns),
                               static_cast<cuuint32_t>(box_rows), 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    const cuuint32_t rank = matrix.batch > 0 ? 3 : 2;
    if (encoder == nullptr ||
        encoder(map, matrix.type, rank, const_cast<void*>(matrix.data), sizes,
                pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
      refused_ = name;
    }
  }

  const char* refused() const { return refused_; }

 private:
  const char* refused_ = nullptr;
};

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_TENSOR_MAP_H_
