// Device memory, pinned memory and copies. Device memory is reserved address space: only pages that
// are written exist, and large copies within the device are not made.

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "nullgpu.h"

namespace nullgpu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSmallCopy = 1 << 20;
constexpr size_t kContext = 512 << 20;  // of the card's memory that no program gets

using Blocks = std::map<char*, size_t>;  // first byte -> bytes

struct State {
  std::mutex lock;
  Blocks device;
  Blocks pinned;
  size_t allocated = 0;
  size_t peak = 0;
  long allocations = 0;
};

State& state() {
  static auto* instance = new State;
  return *instance;
}

size_t round_to_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

char* reserve(size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* place = mmap(nullptr, round_to_pages(bytes), PROT_READ | PROT_WRITE, flags, -1, 0);
  if (place == MAP_FAILED) std::abort();
  return static_cast<char*>(place);
}

bool contains(const Blocks& blocks, const void* pointer) {
  auto* address = const_cast<char*>(static_cast<const char*>(pointer));
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) return false;
  auto block = std::prev(next);
  return address < block->first + block->second;
}

// "D2D", "H2D pinned", "H2D pageable", "D2H pinned" or "D2H pageable".
std::string describe_copy(const void* to, const void* from) {
  State& memory = state();
  std::lock_guard<std::mutex> guard(memory.lock);
  bool to_device = contains(memory.device, to);
  if (to_device && contains(memory.device, from)) return "D2D";
  bool is_pinned = contains(memory.pinned, to_device ? from : to);
  return std::string(to_device ? "H2D" : "D2H") + (is_pinned ? " pinned" : " pageable");
}

void copy(void* to, const void* from, size_t bytes, const std::string& kind) {
  if (kind == "D2D" && bytes > kSmallCopy) return;
  if (kind.rfind("D2H", 0) == 0) {
    std::memset(to, 0, bytes);  // nothing was computed: losses, logits and flags are 0
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

size_t memory_limit() { return read_setting("NULLGPU_BYTES", 84'500'000'000); }
size_t allocated_bytes() { return state().allocated; }
size_t peak_bytes() { return state().peak; }
long allocations() { return state().allocations; }

void reset_memory_counters() {
  State& memory = state();
  std::lock_guard<std::mutex> guard(memory.lock);
  memory.peak = memory.allocated;
  memory.allocations = 0;
}

// Set by device.cc, which reports errors.
cudaError_t fail(cudaError_t error);

}  // namespace nullgpu

using nullgpu::state;

EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  auto& memory = state();
  std::lock_guard<std::mutex> guard(memory.lock);
  *pointer = nullptr;
  if (memory.allocated + bytes > nullgpu::memory_limit()) {
    return nullgpu::fail(cudaErrorMemoryAllocation);
  }
  char* place = nullgpu::reserve(bytes);
  memory.device[place] = bytes;
  memory.allocated += bytes;
  memory.allocations++;
  memory.peak = std::max(memory.peak, memory.allocated);
  *pointer = place;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  auto& memory = state();
  std::lock_guard<std::mutex> guard(memory.lock);
  auto block = memory.device.find(static_cast<char*>(pointer));
  if (block == memory.device.end()) return cudaErrorInvalidValue;
  munmap(pointer, nullgpu::round_to_pages(block->second));
  memory.allocated -= block->second;
  memory.device.erase(block);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  return cudaMalloc(pointer, bytes);
}

EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = nullgpu::memory_limit() - nullgpu::allocated_bytes();
  *total = nullgpu::memory_limit() + nullgpu::kContext;
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  nullgpu::count("[cudaHostAlloc]");
  auto& memory = state();
  std::lock_guard<std::mutex> guard(memory.lock);
  char* place = nullgpu::reserve(bytes);
  memory.pinned[place] = bytes;
  *pointer = place;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void* pointer) {
  auto& memory = state();
  std::lock_guard<std::mutex> guard(memory.lock);
  auto block = memory.pinned.find(static_cast<char*>(pointer));
  if (block == memory.pinned.end()) return cudaSuccess;
  munmap(pointer, nullgpu::round_to_pages(block->second));
  memory.pinned.erase(block);
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  auto& memory = state();
  std::lock_guard<std::mutex> guard(memory.lock);
  std::memset(attributes, 0, sizeof *attributes);
  cudaGetDevice(&attributes->device);
  bool on_device = nullgpu::contains(memory.device, pointer);
  bool is_pinned = nullgpu::contains(memory.pinned, pointer);
  attributes->type = on_device   ? cudaMemoryTypeDevice
                     : is_pinned ? cudaMemoryTypeHost
                                 : cudaMemoryTypeUnregistered;
  if (on_device || is_pinned) attributes->devicePointer = const_cast<void*>(pointer);
  if (is_pinned) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::string kind = nullgpu::describe_copy(to, from);
  nullgpu::count("[copy, host waits: " + kind + "]");
  nullgpu::copy(to, from, bytes, kind);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::string kind = nullgpu::describe_copy(to, from);
  nullgpu::count("[copy: " + kind + "]");
  nullgpu::copy(to, from, bytes, kind);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                       cudaStream_t) {
  nullgpu::copy(to, from, bytes, "D2D");
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  nullgpu::count("[copy: 2D]");
  for (size_t row = 0; row < height; row++) {
    std::memcpy(static_cast<char*>(to) + row * to_pitch,
                static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  nullgpu::count("[memset]");
  if (bytes <= nullgpu::kSmallCopy) std::memset(to, value, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(to, value, bytes);
}

EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char* room = nullgpu::reserve(1 << 20);
  *pointer = room;
  return cudaSuccess;
}
