// One rank's exchanges with its peers on the same host, through memory that all of them map (layout: shared_memory.py).
//
// An exchange is a number of rounds; rounds are counted alike on every rank. In a round a rank writes its data into its
// own slot and publishes the round's number, then it reads the slots of those that have published it too. Each rank has
// two slots, for even and odd rounds. What keeps a slot from being overwritten while somebody reads it: round n is
// written only when everyone has published n - 1, and who has published n - 1 has read all of n - 2.
//
// A wait spins, then yields the processor, then sleeps until the peer wakes it; where somebody else wants the processor
// it sleeps at once. All the while it looks whether this rank is told to leave, and whether a peer has left or died:
// nobody closes anything when that happens.

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t HEADER_BYTES = 4096;
constexpr int SPINS = 1000;
constexpr int64_t YIELD_NS = 1'000'000;
constexpr int64_t CONTENDED_SPIN_NS = 150'000;
constexpr int64_t CONTENDED_YIELD_NS = 20'000;
constexpr int32_t SHY_WAITS = 256;
constexpr int64_t LOOK_NS = 1'000'000;
constexpr int64_t LONGEST_SLEEP_NS = 5'000'000;
constexpr int64_t STRIPED_FROM_BYTES = 32 * 1024;  // with three ranks and more: below, a second round costs more

// Outcomes of an exchange; shared_memory.py has the same list.
enum Outcome : int { DONE, DEAD, LEFT, ABORTED, LATE, ASTRAY };
enum Kind : uint64_t { REDUCE = 1, STRIPES, GATHER, BROADCAST };

struct alignas(128) RankState {
  std::atomic<uint32_t> published;  // the newest round whose data are in this rank's slot; counts modulo 2^32
  std::atomic<uint32_t> sleepers;   // peers that sleep until it changes
  std::atomic<uint32_t> left;
  uint32_t unused;
  uint64_t tags[2];  // what the even and the odd round is about: ranks at different collectives find out
  int64_t times[2];  // when they were published
};

struct Group {  // as in shared_memory.py
  char* base;
  const std::atomic<int32_t>* abort;
  const int32_t* processes;  // a pidfd per rank, -1 for this one
  int64_t slot_bytes;
  int64_t deadline_ns;
  int32_t rank, world;
  int32_t culprit;  // whom the outcome is about
  uint32_t round;
  int32_t shy;  // waits that will sleep at once: others want this processor
  int64_t waited_ns;  // for peers that came later
  std::atomic<int64_t> waiting_since;  // 0 while it does not wait; another thread reads both
};

RankState& state_of(const Group& group, int rank) { return reinterpret_cast<RankState*>(group.base)[rank]; }

char* slot(const Group& group, int rank, uint32_t round) {
  return group.base + HEADER_BYTES + (2 * rank + (round & 1)) * group.slot_bytes;
}

bool reached(const RankState& state, uint32_t round) {
  return static_cast<int32_t>(state.published.load(std::memory_order_acquire) - round) >= 0;
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A peer that has died before it published `round`, or -1. One call asks for all: a pidfd is readable once it has ended.
int dead_peer(const Group& group, uint32_t round) {
  pollfd asked[HEADER_BYTES / sizeof(RankState)];
  for (int rank = 0; rank < group.world; ++rank)
    asked[rank] = {reached(state_of(group, rank), round) ? -1 : group.processes[rank], POLLIN, 0};
  if (poll(asked, group.world, 0) > 0)
    for (int rank = 0; rank < group.world; ++rank)
      if (asked[rank].revents && !reached(state_of(group, rank), round)) return rank;
  return -1;
}

void sleep_on(RankState& state, uint32_t round, int64_t nanoseconds) {
  const timespec limit{0, nanoseconds};
  state.sleepers.fetch_add(1);
  const uint32_t seen = state.published.load();
  if (static_cast<int32_t>(seen - round) < 0)
    syscall(SYS_futex, &state.published, FUTEX_WAIT, seen, &limit, nullptr, 0);
  state.sleepers.fetch_sub(1);
}

// A thread that spends its share of a contended processor on waiting gets none when the peer has come. Spinning or
// yielding that takes much longer than it can by itself shows that the processor is contended.
void mind_others(Group& group, int64_t begun, int64_t longest) {
  if (now() - begun > longest) group.shy = SHY_WAITS;
}

int wait_from(Group& group, int rank, uint32_t round, int64_t begun) {
  RankState& peer = state_of(group, rank);
  if (group.shy) {
    --group.shy;
  } else {
    for (int spin = 0; spin < SPINS; ++spin, relax())
      if (reached(peer, round)) return DONE;
    mind_others(group, begun, CONTENDED_SPIN_NS);
  }
  for (int64_t time = begun, looked = begun; !reached(peer, round); time = now()) {
    group.culprit = rank;
    if (group.abort->load(std::memory_order_relaxed)) return ABORTED;
    if (peer.left.load() && !reached(peer, round)) return LEFT;
    if (time - looked >= LOOK_NS) {
      looked = time;
      const int dead = dead_peer(group, round);
      if (dead >= 0) return group.culprit = dead, DEAD;
      if (time - begun > group.deadline_ns) return LATE;
    }
    if (group.shy || time - begun >= YIELD_NS) {
      sleep_on(peer, round, std::clamp((time - begun) / 16, LOOK_NS, LONGEST_SLEEP_NS));
    } else {
      sched_yield();
      mind_others(group, time, CONTENDED_YIELD_NS);
    }
  }
  return DONE;
}

// The time that counts is how much later the peer came by its own word: a rank without a processor may see it much
// later, and would count its own absence.
int await(Group& group, int rank, uint32_t round) {
  const RankState& peer = state_of(group, rank);
  if (reached(peer, round)) return DONE;
  const int64_t begun = now();
  group.waiting_since.store(begun, std::memory_order_relaxed);
  const int outcome = wait_from(group, rank, round, begun);
  group.waiting_since.store(0, std::memory_order_relaxed);
  if (outcome == DONE) group.waited_ns += std::max<int64_t>(0, peer.times[round & 1] - begun);
  return outcome;
}

int begin(Group& group) {
  ++group.round;
  for (int rank = 0; rank < group.world; ++rank)
    if (const int outcome = await(group, rank, group.round - 1)) return outcome;
  return DONE;
}

void publish(Group& group, uint64_t tag) {
  RankState& own = state_of(group, group.rank);
  own.tags[group.round & 1] = tag;
  own.times[group.round & 1] = now();
  own.published.store(group.round);
  if (own.sleepers.load()) syscall(SYS_futex, &own.published, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int meet(Group& group, int rank, uint64_t tag) {
  if (const int outcome = await(group, rank, group.round)) return outcome;
  if (state_of(group, rank).tags[group.round & 1] == tag) return DONE;
  return group.culprit = rank, ASTRAY;
}

int meet_all(Group& group, uint64_t tag) {
  publish(group, tag);
  for (int rank = 0; rank < group.world; ++rank)
    if (const int outcome = meet(group, rank, tag)) return outcome;
  return DONE;
}

uint64_t tagged(Kind kind, uint64_t detail, int64_t bytes) { return kind << 56 | detail << 48 | bytes; }

// out[i] = the sum of all slots of `round` at begin + i, in the order of the ranks: so every rank gets the same bits.
template <typename T>
void sum(const Group& group, uint32_t round, T* __restrict out, int64_t begin, int64_t count) {
  constexpr int64_t BLOCK = 2048;  // stays in the nearest cache while rank after rank is added
  for (int64_t at = 0; at < count; at += BLOCK) {
    const int64_t length = std::min(BLOCK, count - at);
    T* __restrict total = out + at;
    const T* first = reinterpret_cast<const T*>(slot(group, 0, round)) + begin + at;
    const T* second = reinterpret_cast<const T*>(slot(group, 1, round)) + begin + at;
    for (int64_t i = 0; i < length; ++i) total[i] = first[i] + second[i];
    for (int rank = 2; rank < group.world; ++rank) {
      const T* next = reinterpret_cast<const T*>(slot(group, rank, round)) + begin + at;
      for (int64_t i = 0; i < length; ++i) total[i] += next[i];
    }
  }
}

// Each rank sums one stripe of the round before and the others copy it, so that not every rank reads everything.
template <typename T>
int sum_by_stripes(Group& group, T* out, int64_t count) {
  const int64_t width = (count + group.world - 1) / group.world;
  const auto start = [&](int rank) { return std::min(count, rank * width); };
  if (const int outcome = begin(group)) return outcome;
  T* own = reinterpret_cast<T*>(slot(group, group.rank, group.round)) + start(group.rank);
  sum(group, group.round - 1, own, start(group.rank), start(group.rank + 1) - start(group.rank));
  const uint64_t tag = tagged(STRIPES, sizeof(T), count);
  publish(group, tag);
  for (int rank = 0; rank < group.world; ++rank) {
    if (const int outcome = meet(group, rank, tag)) return outcome;
    const T* stripe = reinterpret_cast<const T*>(slot(group, rank, group.round)) + start(rank);
    std::memcpy(out + start(rank), stripe, (start(rank + 1) - start(rank)) * sizeof(T));
  }
  return DONE;
}

template <typename T>
int all_reduce(Group& group, T* data, int64_t count) {
  const int64_t most = group.slot_bytes / sizeof(T);
  for (int64_t done = 0; done < count; done += most) {
    const int64_t part = std::min(most, count - done), bytes = part * sizeof(T);
    if (const int outcome = begin(group)) return outcome;
    std::memcpy(slot(group, group.rank, group.round), data + done, bytes);
    if (const int outcome = meet_all(group, tagged(REDUCE, sizeof(T), bytes))) return outcome;
    if (group.world == 2 || bytes < STRIPED_FROM_BYTES)
      sum(group, group.round, data + done, 0, part);
    else if (const int outcome = sum_by_stripes(group, data + done, part))
      return outcome;
  }
  return DONE;
}

// Bytes `from` … `from + count` of a rank's rows, into rows that hold every rank's side by side.
void place(const Group& group, int rank, char* out, const char* piece, int64_t from, int64_t count, int64_t row_bytes) {
  while (count > 0) {
    const int64_t row = from / row_bytes, column = from % row_bytes, length = std::min(count, row_bytes - column);
    std::memcpy(out + (row * group.world + rank) * row_bytes + column, piece, length);
    piece += length, from += length, count -= length;
  }
}

}  // namespace

extern "C" {

int furrow_reduce_float(Group* group, float* data, int64_t count) { return all_reduce(*group, data, count); }
int furrow_reduce_double(Group* group, double* data, int64_t count) { return all_reduce(*group, data, count); }
int furrow_reduce_int64(Group* group, int64_t* data, int64_t count) { return all_reduce(*group, data, count); }

// `data` is `rows` rows of `row_bytes`, `out` as many rows of world × row_bytes.
int furrow_gather(Group* group, const char* data, char* out, int64_t rows, int64_t row_bytes) {
  for (int64_t done = 0, all = rows * row_bytes; done < all; done += group->slot_bytes) {
    const int64_t part = std::min(group->slot_bytes, all - done);
    if (const int outcome = begin(*group)) return outcome;
    std::memcpy(slot(*group, group->rank, group->round), data + done, part);
    if (const int outcome = meet_all(*group, tagged(GATHER, 0, part))) return outcome;
    for (int rank = 0; rank < group->world; ++rank)
      place(*group, rank, out, slot(*group, rank, group->round), done, part, row_bytes);
  }
  return DONE;
}

// The source waits for nobody: what it waits for is the next round's room.
int furrow_broadcast(Group* group, char* data, int64_t bytes, int32_t source) {
  for (int64_t done = 0; done < bytes; done += group->slot_bytes) {
    const int64_t part = std::min(group->slot_bytes, bytes - done);
    const uint64_t tag = tagged(BROADCAST, source, part);
    if (const int outcome = begin(*group)) return outcome;
    if (group->rank == source) std::memcpy(slot(*group, source, group->round), data + done, part);
    publish(*group, tag);
    if (const int outcome = meet(*group, source, tag)) return outcome;
    if (group->rank != source) std::memcpy(data + done, slot(*group, source, group->round), part);
  }
  return DONE;
}

void furrow_leave(Group* group) {
  RankState& own = state_of(*group, group->rank);
  own.left.store(1);
  if (own.sleepers.load()) syscall(SYS_futex, &own.published, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
}
