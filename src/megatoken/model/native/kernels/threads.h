// The threads of all kernels. A loop ends when its iterations are done, even if some threads have not begun: next to other
// busy processes, an OpenMP barrier would wait until the scheduler has given every thread its turn.
#pragma once
#include <pthread.h>
#include <sys/resource.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "common.h"

class ThreadPool {
    // How many times a thread polls for work before it sleeps. Waking a thread takes longer than the Python between two
    // kernels, but on a busy machine, spinning uses up the thread's share of a core. So a thread spins long only if it was not
    // preempted during its last CALM waits.
    static constexpr int SHORT = 500, LONG = 5000, CALM = 100;

    alignas(64) std::atomic<Index> unclaimed{0};   // iterations; the next one is size - unclaimed
    alignas(64) std::atomic<Index> unfinished{0};  // iterations
    alignas(64) std::atomic<Index> sleepers{0};
    std::atomic<bool> is_waiting{false};
    std::atomic<bool> in_use{false};
    std::atomic<Index> limit{1};  // threads that may work
    Index n_threads = 1;          // threads that exist, including the caller of a loop
    Index size = 0;               // of the current loop, as what follows
    void (*call)(const void*, Index) = nullptr;
    const void* body = nullptr;
    std::mutex mutex;
    std::condition_variable work, end;

    // Calls the body for unclaimed iterations until none is left.
    void help() {
        Index finished = 0;
        for (Index left = unclaimed; left > 0;) {
            if (!unclaimed.compare_exchange_weak(left, left - 1)) continue;
            call(body, size - left);
            finished++;
            left = unclaimed;
        }
        if (finished && unfinished.fetch_sub(finished) == finished && is_waiting) {
            std::lock_guard lock(mutex);
            end.notify_one();
        }
    }

    // How often the scheduler has taken the core from this thread.
    static long count_preemptions() {
        rusage usage{};
#ifdef RUSAGE_THREAD
        getrusage(RUSAGE_THREAD, &usage);
#endif
        return usage.ru_nivcsw;
    }

    // Returns whether the condition became true before it was time to sleep.
    template <class Condition> static bool spin(const Condition& condition) {
        static thread_local long preemptions = 0;
        static thread_local int calm = 0;  // waits since the thread was preempted
        const long now = count_preemptions();
        calm = now == preemptions ? calm + 1 : 0;
        preemptions = now;
        for (int i = 0; i < (calm > CALM ? LONG : SHORT); i++) {
            if (condition()) return true;
#ifdef __x86_64__
            __builtin_ia32_pause();
#endif
        }
        return false;
    }

    // Waits, holding the mutex. std::condition_variable::wait is newer in libstdc++ 12, which wheels must not need.
    template <class Condition> void wait(std::condition_variable& event, const Condition& condition) {
        while (!condition()) pthread_cond_wait(event.native_handle(), mutex.native_handle());
    }

    // The loop of thread `index`.
    void serve(Index index) {
        const auto has_work = [&] { return unclaimed > 0 && index < limit; };
        while (true) {
            if (has_work()) help();
            if (spin(has_work)) continue;
            std::unique_lock lock(mutex);
            sleepers++;
            wait(work, has_work);
            sleepers--;
        }
    }

  public:
    Index threads() const { return limit; }

    void set_threads(Index n) {
        std::lock_guard lock(mutex);
        limit = n;
        for (; n_threads < n; n_threads++) std::thread([this, index = n_threads] { serve(index); }).detach();
    }

    // Calls f(data, i) for every i < n on all threads; returns false, having done nothing, if another loop is running.
    bool run(Index n, void (*f)(const void*, Index), const void* data) {
        if (limit == 1 || in_use.exchange(true)) return false;
        size = n, call = f, body = data;
        unfinished = n;
        unclaimed = n;
        if (sleepers > 0) {
            std::lock_guard lock(mutex);
            work.notify_all();
        }
        help();
        const auto is_done = [&] { return unfinished == 0; };
        if (!spin(is_done)) {
            std::unique_lock lock(mutex);
            is_waiting = true;
            wait(end, is_done);
            is_waiting = false;
        }
        in_use = false;
        return true;
    }
};

inline ThreadPool& pool() {
    static ThreadPool* pool = new ThreadPool;  // never deleted, because its threads may outlive static objects
    // A forked process has none of the threads, and waking them would never end.
    static const int error = pthread_atfork(nullptr, nullptr, [] { pool = new ThreadPool; });
    (void)error;
    return *pool;
}

// Calls body(i) for every i < n, on several threads; on one thread if called from a body or while another loop is running.
template <class Body> void parallel_for(Index n, const Body& body) {
    // Not inlined, so that one thread runs the same instructions as several, with the same rounding.
    const auto call = [](const void* data, Index i) __attribute__((noinline)) { (*(const Body*)data)(i); };
    if (n < 2 || !pool().run(n, call, &body))
        for (Index i = 0; i < n; i++) call(&body, i);
}
