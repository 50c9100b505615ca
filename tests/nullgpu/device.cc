// The card: what it is (an H100 unless NULLGPU_NAME says otherwise), errors, streams and events.

#include <cuda_runtime_api.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>

#include "nullgpu.h"

namespace nullgpu {
namespace {

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

int count_devices() { return read_setting("NULLGPU_COUNT", 1); }

cudaDeviceProp describe_device() {
  cudaDeviceProp card;
  std::memset(&card, 0, sizeof card);
  const char* name = std::getenv("NULLGPU_NAME");
  std::strncpy(card.name, name ? name : "NVIDIA H100 80GB HBM3", sizeof card.name - 1);
  size_t free = 0;
  cudaMemGetInfo(&free, &card.totalGlobalMem);
  long capability = read_setting("NULLGPU_CAPABILITY", 90);
  card.major = capability / 10;
  card.minor = capability % 10;
  card.multiProcessorCount = read_setting("NULLGPU_MULTIPROCESSORS", 132);
  card.warpSize = 32;
  card.maxThreadsPerBlock = 1024;
  card.maxThreadsPerMultiProcessor = 2048;
  card.maxBlocksPerMultiProcessor = 32;
  card.regsPerBlock = 65536;
  card.regsPerMultiprocessor = 65536;
  card.sharedMemPerBlock = 48 << 10;
  card.sharedMemPerBlockOptin = 227 << 10;
  card.sharedMemPerMultiprocessor = 228 << 10;
  card.totalConstMem = 64 << 10;
  card.l2CacheSize = 50 << 20;
  card.maxThreadsDim[0] = card.maxThreadsDim[1] = 1024;
  card.maxThreadsDim[2] = 64;
  card.maxGridSize[0] = 2147483647;
  card.maxGridSize[1] = card.maxGridSize[2] = 65535;
  card.memPitch = 2147483647;
  card.memoryBusWidth = 5120;
  card.textureAlignment = 512;
  card.asyncEngineCount = 3;
  card.unifiedAddressing = card.concurrentKernels = card.managedMemory = card.cooperativeLaunch = 1;
  card.pciBusID = 7;
  return card;
}

int find_attribute(int attribute) {
  cudaDeviceProp card = describe_device();
  std::map<int, int> values = {
      {cudaDevAttrMaxThreadsPerBlock, card.maxThreadsPerBlock},
      {cudaDevAttrMaxBlockDimX, card.maxThreadsDim[0]},
      {cudaDevAttrMaxBlockDimY, card.maxThreadsDim[1]},
      {cudaDevAttrMaxBlockDimZ, card.maxThreadsDim[2]},
      {cudaDevAttrMaxGridDimX, card.maxGridSize[0]},
      {cudaDevAttrMaxGridDimY, card.maxGridSize[1]},
      {cudaDevAttrMaxGridDimZ, card.maxGridSize[2]},
      {cudaDevAttrMaxSharedMemoryPerBlock, int(card.sharedMemPerBlock)},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, int(card.sharedMemPerBlockOptin)},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, int(card.sharedMemPerMultiprocessor)},
      {cudaDevAttrMaxRegistersPerBlock, card.regsPerBlock},
      {cudaDevAttrMaxRegistersPerMultiprocessor, card.regsPerMultiprocessor},
      {cudaDevAttrMaxThreadsPerMultiProcessor, card.maxThreadsPerMultiProcessor},
      {cudaDevAttrMaxBlocksPerMultiprocessor, card.maxBlocksPerMultiProcessor},
      {cudaDevAttrMultiProcessorCount, card.multiProcessorCount},
      {cudaDevAttrWarpSize, card.warpSize},
      {cudaDevAttrL2CacheSize, card.l2CacheSize},
      {cudaDevAttrComputeCapabilityMajor, card.major},
      {cudaDevAttrComputeCapabilityMinor, card.minor},
      {cudaDevAttrClockRate, 1'980'000},
      {cudaDevAttrMemoryClockRate, 2'619'000},
      {cudaDevAttrGlobalMemoryBusWidth, card.memoryBusWidth},
      {cudaDevAttrMemoryPoolsSupported, 1},
  };
  auto found = values.find(attribute);
  return found == values.end() ? 0 : found->second;
}

double read_clock() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

struct Event {
  double seconds;
};

Event* cast(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

}  // namespace

cudaError_t fail(cudaError_t error) { return last_error = error; }

}  // namespace nullgpu

using namespace nullgpu;

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* card, int) {
  *card = describe_device();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* card, int device) {
  return cudaGetDeviceProperties(card, device);
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = find_attribute(attribute);
  return cudaSuccess;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = find_attribute(attribute);  // the driver numbers them alike
  return 0;
}

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = count_devices();
  return cudaSuccess;
}

EXPORT int cuDeviceGetCount(int* count) {
  *count = count_devices();
  return 0;
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

EXPORT int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
EXPORT int cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, size, "0000:%02x:00.0", 7 + device);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = reinterpret_cast<cudaMemPool_t>(0x10);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  count_sync();
  return cudaSuccess;
}

// --- errors

EXPORT cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "error of the null GPU";
}

EXPORT int cuGetErrorString(int, const char** text) {
  *text = "error of the null GPU's driver";
  return 0;
}

// --- streams, which are numbers, and events, which are times

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static std::atomic<long> next{0x1000};
  *stream = reinterpret_cast<cudaStream_t>(next += 16);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) {
  count_sync();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{read_clock()});
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete cast(event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  cast(event)->seconds = read_clock();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) {
  count_sync();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
  double elapsed = 1e3 * (cast(last)->seconds - cast(first)->seconds);
  *milliseconds = std::max(1e-3, elapsed);
  return cudaSuccess;
}
