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
    const int64_t row = matrix.columns * matrix.element_bytes;
    EncodeTiled(name, map, matrix,
                {{matrix.columns, 0, box_columns},
                 {matrix.rows, row, box_rows},
                 {matrix.batch, row * matrix.rows, 1}},
                matrix.batch > 0 ? 3 : 2, swizzle);
  }

  // The matrix as pieces of so many columns: a box is `box_pieces` tiles of box_rows x piece, one behind
  // the other. Its columns must be whole pieces.
  void EncodePieces(const char* name, CUtensorMap* map, const Matrix& matrix,
                    int box_rows, int piece, int box_pieces,
                    CUtensorMapSwizzle swizzle) {
    const int64_t bytes = piece * matrix.element_bytes;
    EncodeTiled(name, map, matrix,
                {{piece, 0, piece},
                 {matrix.rows, matrix.columns * matrix.element_bytes, box_rows},
                 {matrix.columns / piece, bytes, box_pieces}},
                3, swizzle);
  }

  const char* refused() const { return refused_; }

 private:
  struct Dimension {
    int64_t size, pitch;  // pitch in bytes, of the first one not used
    int box;
  };

  void EncodeTiled(const char* name, CUtensorMap* map, const Matrix& matrix,
                   const Dimension (&dims)[3], int rank,
                   CUtensorMapSwizzle swizzle) {
    if (refused_ != nullptr) return;
    const auto encoder = TensorMapEncoder();
    cuuint64_t sizes[3], pitch[3];
    cuuint32_t box[3];
    for (int i = 0; i < 3; ++i) {
      sizes[i] = static_cast<cuuint64_t>(dims[i].size);
      pitch[i] = static_cast<cuuint64_t>(dims[i].pitch);
      box[i] = static_cast<cuuint32_t>(dims[i].box);
    }
    const cuuint32_t steps[3] = {1, 1, 1};
    if (encoder == nullptr ||
        encoder(map, matrix.type, rank, const_cast<void*>(matrix.data), sizes,
                pitch + 1, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
      refused_ = name;
    }
  }

  const char* refused_ = nullptr;
};

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_TENSOR_MAP_H_
