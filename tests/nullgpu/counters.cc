// Counters of kernels and calls, read by the tests through nullgpu_reset and nullgpu_dump.

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>

#include "nullgpu.h"

namespace nullgpu {
namespace {

// Never destroyed: torch's threads call until the process ends.
std::mutex& lock() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::map<std::string, long>& counters() {
  static auto* map = new std::map<std::string, long>;
  return *map;
}

std::atomic<long> syncs{0};

}  // namespace

void count(const std::string& name) {
  std::lock_guard<std::mutex> guard(lock());
  counters()[name]++;
}

void count_sync() { syncs++; }

}  // namespace nullgpu

EXPORT void nullgpu_reset() {
  std::lock_guard<std::mutex> guard(nullgpu::lock());
  nullgpu::counters().clear();
  nullgpu::syncs = 0;
  nullgpu::reset_memory_counters();
}

// Write a line "COUNT<tab>NAME" per counter; names that begin with # are not calls.
EXPORT void nullgpu_dump(const char* path) {
  std::lock_guard<std::mutex> guard(nullgpu::lock());
  FILE* file = std::fopen(path, "w");
  for (const auto& [name, value] : nullgpu::counters()) {
    std::fprintf(file, "%ld\t%s\n", value, name.c_str());
  }
  std::fprintf(file, "%ld\t#syncs\n", nullgpu::syncs.load());
  std::fprintf(file, "%ld\t#allocations\n", nullgpu::allocations());
  std::fprintf(file, "%zu\t#allocated_bytes\n", nullgpu::allocated_bytes());
  std::fprintf(file, "%zu\t#peak_bytes\n", nullgpu::peak_bytes());
  std::fclose(file);
}
