// What the launch functions share.
#ifndef JAX_W4A4_CUDA_LAUNCH_H_
#define JAX_W4A4_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "launch_result.h"

namespace jax_w4a4 {

// Raises a kernel's dynamic shared-memory limit on `device`, the current one, if
// it is lower; never lowers what another thread has set. Returns a cudaError_t.
inline int RaiseSmemLimit(const void* kernel, int device, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> limits;
  std::lock_guard<std::mutex> lock(mutex);
  int& limit = limits[{kernel, device}];
  if (limit >= bytes) return cudaSuccess;
  const int code = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (code == cudaSuccess) limit = bytes;
  return code;
}

// Asks that SMs that run the kernel on `device`, the current one, be split for
// the most shared memory: an SM must drain before its split changes, so a launch
// that is to run beside this one and needs much of it would wait. A preference: a
// driver that has no such thing is not asked again.
inline void PreferShared(const void* kernel, int device) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, bool> done;
  std::lock_guard<std::mutex> lock(mutex);
  bool& known = done[{kernel, device}];
  if (known) return;
  known = true;
  if (cudaFuncSetAttribute(kernel,
                           cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared) != cudaSuccess) {
    cudaGetLastError();
  }
}

// Allows launches of `kernel` on `device`, the current one, in clusters of more CTAs than the eight that
// every chip has room for. Returns a cudaError_t.
inline int AllowCluster(const void* kernel, int device, int cluster) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, bool> allowed;
  if (cluster <= 8) return cudaSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  bool& known = allowed[{kernel, device}];
  if (known) return cudaSuccess;
  const int code = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  known = code == cudaSuccess;
  return code;
}

inline cudaLaunchAttribute ClusterAttribute(int cluster) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// How many clusters of a persistent kernel run at once; asked once per kernel and
// device. Registers allow one CTA per SM, so less shared memory than `smem_bytes`
// never fits more. Returns a cudaError_t.
inline int MaxClusters(const void* kernel, int cluster, int threads,
                       int smem_bytes, int device, int* clusters) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> table;
  std::lock_guard<std::mutex> lock(mutex);
  int& known = table[{kernel, device}];
  if (known == 0) {
    cudaLaunchAttribute attribute = ClusterAttribute(cluster);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(cluster);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (int code = cudaOccupancyMaxActiveClusters(&known, kernel, &config);
        code != cudaSuccess) {
      return code;
    }
  }
  *clusters = known;
  return known > 0 ? cudaSuccess : cudaErrorInvalidConfiguration;
}

// A persistent kernel with one argument. `dependent`: it may start while the launch
// before it on the stream still runs.
inline LaunchResult LaunchClusters(const void* kernel, void* argument,
                                   int clusters, int cluster, int threads,
                                   int smem_bytes, bool dependent,
                                   cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {ClusterAttribute(cluster), {}};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(clusters * cluster);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = dependent ? 2 : 1;
  void* args[] = {argument};
  return {cudaLaunchKernelExC(&config, kernel, args), nullptr,
          clusters * cluster};
}

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_LAUNCH_H_
