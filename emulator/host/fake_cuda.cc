// The part of the CUDA runtime that the launch code calls, so that it runs
// unchanged on a machine without a driver. Launches and tensor maps go to the
// callbacks of emulator/host.py.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace {

struct LaunchInfo {
  const char* kernel;
  int grid[3], block[3];
  int cluster, smem_bytes, dependent;
};

using LaunchCallback = int (*)(const LaunchInfo*, void** args);
using EncodeCallback = int (*)(void* map, int type, int rank, void* address,
                               const void* sizes, const void* strides,
                               const void* box, const void* steps,
                               int interleave, int swizzle, int l2, int fill);

LaunchCallback g_launch;
EncodeCallback g_encode;
int g_clusters = 1;

// Of a launch in the <<<>>> notation, between its two halves.
struct Configuration {
  dim3 grid, block;
  size_t smem;
};
Configuration g_configuration;

// Kernels that may be launched in clusters of more than eight CTAs.
std::set<const void*>& LargeClusters() {
  static auto* kernels = new std::set<const void*>;
  return *kernels;
}

std::map<const void*, std::string>& Kernels() {
  static auto* kernels = new std::map<const void*, std::string>;
  return *kernels;
}
// Per kernel and device, which is the number of clusters here (entry_sm90.cc).
std::map<std::pair<const void*, int>, int>& SmemLimits() {
  static auto* limits = new std::map<std::pair<const void*, int>, int>;
  return *limits;
}

CUresult Encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                void* address, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
                CUtensorMapFloatOOBfill fill) {
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return g_encode(map, type, rank, address, sizes, strides, box, steps,
                  interleave, swizzle, l2, fill) == 0
             ? CUDA_SUCCESS
             : CUDA_ERROR_INVALID_VALUE;
}

cudaError_t Launch(const void* function, dim3 grid, dim3 block, size_t smem,
                   int cluster, int dependent, void** args) {
  const auto kernel = Kernels().find(function);
  if (kernel == Kernels().end()) return cudaErrorInvalidDeviceFunction;
  const auto limit = SmemLimits().find({function, g_clusters});
  const int allowed = limit == SmemLimits().end() ? 48 * 1024 : limit->second;
  if (static_cast<int>(smem) > allowed) return cudaErrorInvalidValue;
  const int largest = LargeClusters().count(function) != 0 ? 16 : 8;
  if (grid.x % cluster != 0 || cluster > largest) {
    return cudaErrorInvalidClusterSize;
  }
  const LaunchInfo info = {kernel->second.c_str(),
                           {int(grid.x), int(grid.y), int(grid.z)},
                           {int(block.x), int(block.y), int(block.z)},
                           cluster,
                           static_cast<int>(smem),
                           dependent};
  return static_cast<cudaError_t>(g_launch(&info, args));
}

}  // namespace

extern "C" {

void emulator_connect(LaunchCallback launch, EncodeCallback encode) {
  g_launch = launch;
  g_encode = encode;
}

// What cudaOccupancyMaxActiveClusters answers from now on.
void emulator_set_clusters(int clusters) { g_clusters = clusters; }

// ---- what nvcc's host stubs call ----

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int,
                       int) {}
void __cudaRegisterFunction(void**, const char* host, char*,
                            const char* device_name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  Kernels()[host] = device_name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem,
                                     cudaStream_t) {
  g_configuration = {grid, block, smem};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* smem,
                                       void*) {
  *grid = g_configuration.grid;
  *block = g_configuration.block;
  *smem = g_configuration.smem;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block,
                               void** args, size_t smem, cudaStream_t) {
  return Launch(kernel, grid, block, smem, 1, 0, args);
}

// ---- the runtime ----

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block,
                             void** args, size_t smem, cudaStream_t) {
  return Launch(function, grid, block, smem, 1, 0, args);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                const void* function, void** args) {
  int cluster = 1, dependent = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    switch (attribute.id) {
      case cudaLaunchAttributeClusterDimension:
        if (attribute.val.clusterDim.y != 1 || attribute.val.clusterDim.z != 1) {
          return cudaErrorNotSupported;
        }
        cluster = attribute.val.clusterDim.x;
        break;
      case cudaLaunchAttributeProgrammaticStreamSerialization:
        dependent = attribute.val.programmaticStreamSerializationAllowed;
        break;
      default:
        return cudaErrorNotSupported;
    }
  }
  return Launch(function, config->gridDim, config->blockDim,
                config->dynamicSmemBytes, cluster, dependent, args);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute which,
                                 int value) {
  if (Kernels().count(function) == 0) return cudaErrorInvalidDeviceFunction;
  if (which == cudaFuncAttributePreferredSharedMemoryCarveout) {
    return value < -1 || value > 100 ? cudaErrorInvalidValue : cudaSuccess;
  }
  if (which == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    if (value) LargeClusters().insert(function);
    return cudaSuccess;
  }
  if (which != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return cudaErrorNotSupported;
  }
  if (value > 232448) return cudaErrorInvalidValue;
  SmemLimits()[{function, g_clusters}] = value;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function,
                                           const cudaLaunchConfig_t*) {
  if (Kernels().count(function) == 0) return cudaErrorInvalidDeviceFunction;
  *clusters = g_clusters;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** found, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* status) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *found = known ? reinterpret_cast<void*>(&Encode) : nullptr;
  if (status != nullptr) {
    *status = known ? cudaDriverEntryPointSuccess
                    : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

}  // extern "C"
