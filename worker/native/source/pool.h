// The threads of a rank, and how they share a job.
//
// A job is the same code on every thread: a row of phases, each cut into pieces. Each thread has a range of neighbouring pieces, so that
// it reads memory from front to back, and takes those of other ranges when its own has none left. A phase is over when its pieces are
// done, not when the threads have come. So a thread that was not given a processor holds nobody up, unless it stopped in the middle of
// a piece; when it runs again it finds the phases over and skips them. The caller is one of the threads, and could do all by itself.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#else  // macOS; untried
extern "C" int __ulock_wait(uint32_t operation, void* address, uint64_t value, uint32_t microseconds);
extern "C" int __ulock_wake(uint32_t operation, void* address, uint64_t value);
#endif

namespace furrow {

// A moment's rest for a thread that spins.
inline void rest() {
#if defined(__aarch64__)
  asm volatile("isb");
#else
  __builtin_ia32_pause();
#endif
}

constexpr int SPINS = 2000;                   // some 30 µs: what is waited for takes less where nobody else wants the processor
constexpr int64_t PATIENCE_NS = 2'000'000;    // after which a thread leaves the rest of a job to the others

class Pool;

// One thread's place in a job.
class Hand {
 public:
  Hand(Pool& pool, int thread, uint32_t phase) : thread(thread), pool_(pool), phase_(phase) {}

  // `part(from, to)` for pieces of 0 … count, by whoever is free; it returns when all are done. The numbers must be the
  // same on every thread. A thread that has given up returns at once, from this and all that follow.
  template <typename Part>
  void each(int64_t count, int64_t piece, const Part& part) {
    share(count, piece, &part, [](const void* one, int64_t from, int64_t to) { (*static_cast<const Part*>(one))(from, to); });
  }

  int threads() const;

  const int thread;

 private:
  friend class Pool;

  // Compiled once, not for every kind of part.
  using Call = void (*)(const void* part, int64_t from, int64_t to);
  void share(int64_t count, int64_t piece, const void* part, Call call);

  Pool& pool_;
  uint32_t phase_;
  bool gone_ = false;
};

using Job = std::function<void(Hand&)>;

class Pool {
 public:
  explicit Pool(int threads) : threads_(std::max(1, threads)), taken_(static_cast<size_t>(threads_)) {}

  ~Pool() {
    if (workers_.empty()) return;
    if (getpid() == owner_) {
      post(nullptr);
      for (std::thread& worker : workers_) worker.join();
    } else {
      leave_behind();
    }
  }

  int threads() const { return threads_; }

  // Changes with every piece and phase of a job that is done. Another thread may read it at any time.
  const std::atomic<uint64_t>* progress() const { return &turn_; }

  // Others may come late to a job, or still be on their way out of it when this returns: it must own what it reads
  // outside of its pieces.
  void run(Job job) {
    const std::lock_guard<std::mutex> one_at_a_time(busy_);
    if (threads_ > 1) {
      start();
      post(std::make_shared<Posted>(Posted{std::move(job), phase()}));
    } else {
      current_ = std::make_shared<Posted>(Posted{std::move(job), 0});
    }
    Hand caller(*this, 0, current_->phase);
    current_->job(caller);
  }

 private:
  friend class Hand;

  struct Posted {
    Job job;
    uint32_t phase;  // its first one
  };

  uint32_t phase() const { return static_cast<uint32_t>(turn_.load(std::memory_order_acquire) >> 32); }

  // Where the caller is the only thread.
  void next_phase() { turn_.store(static_cast<uint64_t>(phase() + 1) << 32, std::memory_order_relaxed); }

  // A piece of the phase that nobody has taken, of the thread's own range first, or -1 where there is none, or the phase is over.
  // `passed`: ranges that had none left when this thread looked.
  int64_t take(int thread, uint32_t phase, int64_t pieces, int& passed) {
    for (; passed < threads_; ++passed) {
      const int64_t range = (thread + passed) % threads_, first = pieces * range / threads_;
      const int64_t length = pieces * (range + 1) / threads_ - first;
      if (length == 0) continue;
      std::atomic<uint64_t>& taken = taken_[range].count;
      uint64_t before = taken.load(std::memory_order_acquire);
      while (true) {
        // A count of another phase is of an earlier one, unless this phase is over: all ranges have been taken then.
        const bool counted = before >> 32 == phase;
        if (!counted && this->phase() != phase) return -1;
        const int64_t number = counted ? static_cast<int64_t>(before & UINT32_MAX) : 0;
        if (number == length) break;
        const uint64_t after = static_cast<uint64_t>(phase) << 32 | static_cast<uint64_t>(number + 1);
        if (taken.compare_exchange_weak(before, after, std::memory_order_acq_rel)) return first + number;
      }
    }
    return -1;
  }

  void done(uint32_t phase, int64_t pieces) {
    const uint64_t turn = turn_.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (static_cast<int64_t>(turn & UINT32_MAX) == pieces)
      turn_.store(static_cast<uint64_t>(phase + 1) << 32, std::memory_order_release);
  }

  // True if the phase was over in time; the caller of a job waits as long as it takes.
  bool over(uint32_t current, bool patient) {
    for (int spin = 0; spin < SPINS; ++spin, rest())
      if (phase() != current) return true;
    for (const int64_t begun = now(); phase() == current; sched_yield())
      if (!patient && now() - begun > PATIENCE_NS) return false;
    return true;
  }

  static int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
  }

  // The threads start with the first job, and anew in a forked child, where there are none.
  void start() {
    if (!workers_.empty() && getpid() == owner_) return;
    leave_behind();
    owner_ = getpid();
    sleepers_ = 0;
    sigset_t every, before;  // signals are for the thread that Python's handlers run in
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    for (int thread = 1; thread < threads_; ++thread) workers_.emplace_back(&Pool::work, this, thread, rounds_.load());
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Of threads that only a parent has nothing may be touched.
  void leave_behind() { new std::vector<std::thread>(std::exchange(workers_, {})); }

  void post(std::shared_ptr<Posted> job) {
    std::atomic_store(&current_, std::move(job));
    rounds_.fetch_add(1);
    if (sleepers_.load()) wake_all();
  }

  void work(int thread, uint32_t round) {
    while (true) {
      for (int spin = 0; spin < SPINS && rounds_.load(std::memory_order_acquire) == round; ++spin) rest();
      sleepers_.fetch_add(1);
      while (rounds_.load() == round) sleep_while(round);
      sleepers_.fetch_sub(1);
      round = rounds_.load();
      const std::shared_ptr<Posted> posted = std::atomic_load(&current_);
      if (!posted) return;
      Hand hand(*this, thread, posted->phase);
      posted->job(hand);
    }
  }

#if defined(__linux__)
  void sleep_while(uint32_t round) {
    syscall(SYS_futex, &rounds_, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, round, nullptr, nullptr, 0);
  }
  void wake_all() { syscall(SYS_futex, &rounds_, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, nullptr, nullptr, 0); }
#else
  static constexpr uint32_t COMPARE_AND_WAIT = 1, WAKE_ALL = 0x100;
  void sleep_while(uint32_t round) { __ulock_wait(COMPARE_AND_WAIT, &rounds_, round, 0); }
  void wake_all() { __ulock_wake(COMPARE_AND_WAIT | WAKE_ALL, &rounds_, 0); }
#endif

  const int threads_;
  pid_t owner_ = 0;
  std::mutex busy_;
  std::vector<std::thread> workers_;
  std::shared_ptr<Posted> current_;
  alignas(64) std::atomic<uint32_t> rounds_{0};
  std::atomic<int32_t> sleepers_{0};
  struct alignas(64) Taken {
    std::atomic<uint64_t> count{0};  // a phase, and below it how many pieces of the range were taken in it
  };
  std::vector<Taken> taken_;                   // by thread
  alignas(64) std::atomic<uint64_t> turn_{0};  // the phase that is under way, and below it how many of its pieces are done
};

inline int Hand::threads() const { return pool_.threads(); }

__attribute__((noinline)) inline void Hand::share(int64_t count, int64_t piece, const void* part, Call call) {
  if (pool_.threads() == 1) {
    call(part, 0, count);
    return pool_.next_phase();
  }
  if (gone_ || count == 0) return;
  const int64_t pieces = (count + piece - 1) / piece;
  int passed = 0;
  for (int64_t number; (number = pool_.take(thread, phase_, pieces, passed)) >= 0; pool_.done(phase_, pieces))
    call(part, number * piece, std::min(count, (number + 1) * piece));
  gone_ = !pool_.over(phase_, thread == 0);
  ++phase_;
}

}  // namespace furrow
