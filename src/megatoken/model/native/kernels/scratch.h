// Buffers that a thread keeps between calls, because allocating new pages would take longer than the computation in them.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "common.h"

class Scratch {
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    struct Buffer {
        std::unique_ptr<void, Free> memory;
        size_t bytes = 0;
    };
    std::vector<Buffer> buffers;
    size_t next = 0;

  public:
    void rewind() { next = 0; }

    template <class E> E* take(Index n) {
        if (next == buffers.size()) buffers.emplace_back();
        Buffer& buffer = buffers[next++];
        if (buffer.bytes < n * sizeof(E)) {
            const size_t page = n * sizeof(E) < 1 << 17 ? 4096 : 1 << 21;  // large buffers use large pages
            buffer.bytes = (n * sizeof(E) + page - 1) / page * page;
            buffer.memory.reset();
            buffer.memory.reset(std::aligned_alloc(page, buffer.bytes));
#ifdef MADV_HUGEPAGE
            if (page > 4096) madvise(buffer.memory.get(), buffer.bytes, MADV_HUGEPAGE);
#endif
        }
        return (E*)buffer.memory.get();
    }
};
