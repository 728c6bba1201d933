#ifndef JAX_W4A4_CUDA_LAUNCH_RESULT_H_
#define JAX_W4A4_CUDA_LAUNCH_RESULT_H_

namespace jax_w4a4 {

// Of the launch function of a persistent kernel.
struct LaunchResult {
  int code;            // cudaError_t
  const char* detail;  // what else went wrong, or null
  int grid;            // CTAs launched
};

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_LAUNCH_RESULT_H_
