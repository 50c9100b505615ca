// Shared by the files of the null GPU: counters of calls, and its memory.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <string>

// Entry points replace those of the CUDA libraries, which are loaded after this one.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace nullgpu {

// Add one to the counter `name`: a kernel's mangled name, or a call in brackets.
void count(const std::string& name);

// Add one to the number of times that the host waited for the device.
void count_sync();

// Bytes of device memory that programs may allocate (NULLGPU_BYTES).
size_t memory_limit();

// Bytes allocated, their peak since the last reset, and the number of allocations since then.
size_t allocated_bytes();
size_t peak_bytes();
long allocations();
void reset_memory_counters();

inline long read_setting(const char* name, long value) {
  const char* text = std::getenv(name);
  return text ? std::strtol(text, nullptr, 10) : value;
}

}  // namespace nullgpu
