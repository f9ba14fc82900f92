// The threads of a rank. The caller is one of them; the others spin for a moment when they have nothing to do, then sleep.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace furrow {

constexpr int IDLE_SPINS = 4000;   // some 40 µs: the next product of the same layer comes sooner, the next step later
constexpr int BARRIER_SPINS = 20000;

inline void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

class Pool {
 public:
  explicit Pool(int threads) : threads_(std::max(1, threads)) {}

  ~Pool() {
    if (workers_.empty()) return;
    if (getpid() != owner_) {
      forget();
      return;
    }
    job_ = nullptr;
    wake();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  // `job(thread)` on every thread at the same time. It returns when all have returned.
  void run(const std::function<void(int)>& job) {
    if (threads_ == 1) return job(0);
    const std::lock_guard<std::mutex> one_at_a_time(busy_);
    begin();
    job_ = &job;
    wake();
    job(0);
    barrier();
  }

  // Within a job, called by all threads alike: `part(from, to)` for pieces of 0 … count, whoever is free takes the next.
  // It returns when all pieces are done.
  template <typename Part>
  void each(int64_t count, int64_t piece, const Part& part) {
    if (threads_ == 1) return part(0, count);
    std::atomic<int64_t>& next = next_[phase_.load(std::memory_order_relaxed) & 1];
    for (int64_t from; (from = next.fetch_add(piece, std::memory_order_relaxed)) < count;)
      part(from, std::min(count, from + piece));
    barrier();
  }

  // All threads wait for each other. Whoever comes last makes the counter of the phase ready for the one after the next.
  void barrier() {
    if (threads_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_[phase & 1].store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spin = 0; phase_.load(std::memory_order_acquire) == phase; ++spin)
      spin < BARRIER_SPINS ? __builtin_ia32_pause() : static_cast<void>(sched_yield());
  }

 private:
  // The threads start with the first job, and anew in a forked child, where there are none.
  void begin() {
    if (!workers_.empty() && getpid() == owner_) return;
    if (!workers_.empty()) forget();
    owner_ = getpid();
    arrived_ = 0, sleepers_ = 0;
    sigset_t every, before;  // signals are for the thread that Python's handlers run in
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    for (int thread = 1; thread < threads_; ++thread) workers_.emplace_back(&Pool::work, this, thread, rounds_.load());
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Of threads that a parent has, nothing may be touched; what names them is left behind.
  void forget() { new std::vector<std::thread>(std::move(workers_)), workers_.clear(); }

  void wake() {
    rounds_.fetch_add(1);
    if (sleepers_.load()) futex(rounds_, FUTEX_WAKE, INT_MAX);
  }

  void work(int thread, uint32_t round) {
    for (;; ++round) {
      for (int spin = 0; rounds_.load(std::memory_order_acquire) == round; ++spin) {
        if (spin < IDLE_SPINS) {
          __builtin_ia32_pause();
          continue;
        }
        sleepers_.fetch_add(1);
        futex(rounds_, FUTEX_WAIT, round);
        sleepers_.fetch_sub(1);
      }
      if (!job_) return;
      (*job_)(thread);
      barrier();
    }
  }

  const int threads_;
  pid_t owner_ = 0;
  std::mutex busy_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* job_ = nullptr;
  alignas(64) std::atomic<uint32_t> rounds_{0};
  std::atomic<int32_t> sleepers_{0};
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int64_t> next_[2] = {0, 0};
};

}  // namespace furrow
