// cuBLAS, cuDNN and NCCL: what torch calls of them, counted by name.

#include <cstdlib>
#include <cstring>

#include "nullgpu.h"

#define COUNTED(name) \
  EXPORT int name(...) { \
    nullgpu::count("[" #name "]"); \
    return 0; \
  }

namespace {

int give(void** handle, long value) {
  *handle = reinterpret_cast<void*>(value);
  return 0;
}

int allocate(void** descriptor, size_t bytes) {
  *descriptor = std::calloc(1, bytes);
  return 0;
}

int release(void* descriptor) {
  std::free(descriptor);
  return 0;
}

}  // namespace

// --- cuBLAS

COUNTED(cublasLtMatmul)
COUNTED(cublasGemmEx)
COUNTED(cublasGemmStridedBatchedEx)
COUNTED(cublasSgemm_v2)
COUNTED(cublasSgemmStridedBatched)

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  unsigned long long algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

EXPORT int cublasCreate_v2(void** handle) { return give(handle, 0x40); }
EXPORT size_t cublasLtGetVersion() { return 130100; }
EXPORT int cublasLtMatmulDescCreate(void** d, int, int) { return allocate(d, 256); }
EXPORT int cublasLtMatmulPreferenceCreate(void** d) { return allocate(d, 256); }
EXPORT int cublasLtMatrixLayoutCreate(void** d, int, unsigned long, unsigned long, long) {
  return allocate(d, 256);
}
EXPORT int cublasLtMatmulDescDestroy(void* d) { return release(d); }
EXPORT int cublasLtMatmulPreferenceDestroy(void* d) { return release(d); }
EXPORT int cublasLtMatrixLayoutDestroy(void* d) { return release(d); }

EXPORT int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}

EXPORT int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                          Heuristic* results, int* count) {
  std::memset(results, 0, sizeof *results);
  *count = 1;
  return 0;
}

// --- cuDNN's graph API: a plan per shape, and its executions

struct Descriptor {
  int type;
  char room[1020];
};

constexpr int kExecutionPlan = 5;  // cudnnBackendDescriptorType_t
constexpr int kInt64 = 3;          // cudnnBackendAttributeType_t
constexpr int kEngineConfig = 15;
constexpr int kInt32 = 23;

COUNTED(cudnnBackendExecute)

EXPORT int cudnnCreate(void** handle) { return give(handle, 0x70); }
EXPORT int cudnnSetStream(void*, void*) { return 0; }
EXPORT int cudnnBackendSetAttribute(...) { return 0; }
EXPORT int cudnnBackendDestroyDescriptor(void* d) { return release(d); }

EXPORT int cudnnGetStream(void*, void** stream) {
  *stream = nullptr;
  return 0;
}

EXPORT int cudnnBackendCreateDescriptor(int type, void** descriptor) {
  allocate(descriptor, sizeof(Descriptor));
  static_cast<Descriptor*>(*descriptor)->type = type;
  return 0;
}

EXPORT int cudnnBackendFinalize(void* descriptor) {
  bool is_plan = static_cast<Descriptor*>(descriptor)->type == kExecutionPlan;
  if (is_plan) nullgpu::count("[cudnn plan]");
  return 0;
}

EXPORT int cudnnBackendGetAttribute(void*, int, int type, long requested, long* count, void* array) {
  bool has_value = type == kInt64 || type == kInt32 || type == kEngineConfig;
  if (count) *count = has_value;
  bool writes = array && requested > 0;
  if (writes && type == kInt64) *static_cast<long*>(array) = 0;
  if (writes && type == kInt32) *static_cast<int*>(array) = 0;
  return 0;
}

EXPORT const char* cudnnGetErrorString(int) { return "error of the null GPU's cuDNN"; }
EXPORT void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) *text = 0;
}

// --- NCCL

COUNTED(ncclAllReduce)
COUNTED(ncclAllGather)
COUNTED(ncclReduceScatter)
COUNTED(ncclReduce)
COUNTED(ncclBroadcast)
COUNTED(ncclSend)
COUNTED(ncclRecv)

EXPORT int cudaMalloc(void** pointer, size_t bytes);

EXPORT int ncclMemAlloc(void** pointer, size_t bytes) { return cudaMalloc(pointer, bytes); }
EXPORT int ncclCommInitRank(void** communicator, ...) { return give(communicator, 0x50); }
EXPORT int ncclCommInitRankConfig(void** communicator, ...) { return give(communicator, 0x50); }
EXPORT int ncclCommInitRankScalable(void** communicator, ...) { return give(communicator, 0x50); }
EXPORT int ncclCommSplit(void*, int, int, void** part, void*) { return give(part, 0x51); }
EXPORT const char* ncclGetErrorString(int) { return "error of the null GPU's NCCL"; }
EXPORT const char* ncclGetLastError(void*) { return "error of the null GPU's NCCL"; }

EXPORT int ncclGetVersion(int* version) {
  *version = 22809;
  return 0;
}

EXPORT int ncclGetUniqueId(void* id) {
  std::memset(id, 7, 128);
  return 0;
}

EXPORT int ncclCommGetAsyncError(void*, int* error) {
  *error = 0;
  return 0;
}

EXPORT int ncclCommCount(void*, int* count) {
  *count = nullgpu::read_setting("NULLGPU_COUNT", 1);
  return 0;
}
