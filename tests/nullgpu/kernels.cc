// Launches, which only count: torch's kernels by the names that nvcc registers, Triton's by the
// names in its modules; and CUDA graphs.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "nullgpu.h"

namespace {

std::mutex& lock() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::map<const void*, std::string>& kernel_names() {
  static auto* names = new std::map<const void*, std::string>;
  return *names;
}

void count_kernel(const void* kernel) {
  std::string name = "unregistered kernel";
  {
    std::lock_guard<std::mutex> guard(lock());
    auto found = kernel_names().find(kernel);
    if (found != kernel_names().end()) name = found->second;
  }
  nullgpu::count(name);
}

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared;
  void* stream;
};

thread_local std::vector<Configuration> configurations;  // of <<<...>>> calls

cudaStream_t no_stream() { return reinterpret_cast<cudaStream_t>(-1); }
std::atomic<cudaStream_t> captured_stream{no_stream()};
std::atomic<unsigned long long> capture_id{0};

cudaStreamCaptureStatus find_capture_status(cudaStream_t stream) {
  return captured_stream == stream ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

}  // namespace

// --- kernels that nvcc compiled into torch

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 0; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*,
                                   void*, void*, void*, int*) {
  std::lock_guard<std::mutex> guard(lock());
  kernel_names()[host] = name;
}

EXPORT cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared,
                                              void* stream) {
  Configuration configuration = configurations.back();
  configurations.pop_back();
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  count_kernel(kernel);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  count_kernel(kernel);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  count_kernel(kernel);
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*,
                                                                          int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                                 size_t) {
  *blocks = 2;
  return cudaSuccess;
}

// --- kernels that Triton loads through the driver; a function handle is its name

EXPORT int cuModuleLoadData(void** module, const void*) {
  *module = reinterpret_cast<void*>(0x30);
  return 0;
}

EXPORT int cuModuleLoadDataEx(void** module, const void* image, unsigned, void*, void**) {
  return cuModuleLoadData(module, image);
}

EXPORT int cuModuleLoad(void** module, const char*) { return cuModuleLoadData(module, nullptr); }

EXPORT int cuModuleGetFunction(void** function, void*, const char* name) {
  *function = new std::string(name);
  return 0;
}

EXPORT int cuFuncGetAttribute(int* value, int attribute, void*) {
  constexpr int kMaxThreads = 0;
  constexpr int kRegisters = 4;
  *value = attribute == kRegisters ? 32 : attribute == kMaxThreads ? 1024 : 0;
  return 0;
}

static int count_triton(void* function) {
  nullgpu::count("triton " + *static_cast<std::string*>(function));
  return 0;
}

EXPORT int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, unsigned, void*, void**, void**) {
  return count_triton(function);
}

EXPORT int cuLaunchKernelEx(const void*, void* function, void**, void**) {
  return count_triton(function);
}

EXPORT int cuLaunchCooperativeKernel(void* function, unsigned, unsigned, unsigned, unsigned,
                                     unsigned, unsigned, unsigned, void*, void**) {
  return count_triton(function);
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
  *blocks = 2;
  return 0;
}

EXPORT int cuOccupancyMaxActiveClusters(int* clusters, void*, const void*) {
  *clusters = 2;
  return 0;
}

// --- the driver's context and pointers

static void* context() { return reinterpret_cast<void*>(0x20); }

EXPORT int cuCtxGetCurrent(void** current) {
  *current = context();
  return 0;
}

EXPORT int cuDevicePrimaryCtxRetain(void** primary, int) {
  *primary = context();
  return 0;
}

EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}

EXPORT int cuCtxGetLimit(size_t* value, int) {
  *value = 1 << 20;
  return 0;
}

EXPORT int cuPointerGetAttribute(void* value, int attribute, unsigned long long pointer) {
  constexpr int kDevicePointer = 3;
  if (attribute == kDevicePointer) {
    *static_cast<unsigned long long*>(value) = pointer;
  } else {
    *static_cast<int*>(value) = 0;
  }
  return 0;
}

static int succeed(...) { return 0; }

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(succeed);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- CUDA graphs: a capture counts its kernels once, a launch counts as one call

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  nullgpu::count("[graph capture]");
  captured_stream = stream;
  capture_id++;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  captured_stream = no_stream();
  *graph = reinterpret_cast<cudaGraph_t>(0x60);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t,
                                                 unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(0x61);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  nullgpu::count("[graph launch]");
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = find_capture_status(stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t*,
                                            const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                            size_t*) {
  *status = find_capture_status(stream);
  if (id) *id = captured_stream == stream ? capture_id.load() : 0;
  return cudaSuccess;
}
