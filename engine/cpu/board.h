// How the engines of a host share its cores: a page of shared memory, a line for each engine, which
// only its owner writes. worker/cores/core_board.py makes the file and decides; here it is obeyed.
//
// An engine that yields (prefill) leaves cores to those that are urgent (decode) at once, and without
// ever being put aside with work in hand: its helpers look before they take a piece of work, and an
// urgent step waits, some tens of microseconds, until those in the way have handed theirs in. A
// thread that is descheduled in the middle of a piece would hold up all others of its step.

#pragma once

#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

struct Line {
  std::atomic<int64_t> alive;  // when the step that runs was last seen to, in nanoseconds of
                               // CLOCK_MONOTONIC; 0: none runs
  std::atomic<int32_t> urgent;  // threads of it that yield to nobody
  std::atomic<int32_t> helping;  // threads of it, besides the first, that have work in hand
  std::atomic<int64_t> busy_since;  // for worker/cores/core_board.py alone
  char rest[40];
};
static_assert(sizeof(Line) == 64, "worker/cores/core_board.py packs it");

struct Board {
  Line* lines = nullptr;
  int64_t count = 0, mine = 0, cores = 0;

  static const int64_t STALE_NS = 5000000000;  // a dead engine's line counts no longer than that
  static const int NICENESS = 10;  // as in worker/cores/core_board.py

  // Helpers that a step which yields may have now.
  int helpers() const {
    if (!lines) return INT32_MAX;
    const int64_t now = nanoseconds();
    int64_t taken = 1;
    for (int64_t i = 0; i < count; i++) {
      if (i == mine) continue;
      const int64_t alive = lines[i].alive.load(std::memory_order_relaxed);
      if (!alive || now - alive > STALE_NS) continue;
      taken += std::max(1, lines[i].urgent.load());
    }
    return (int)std::max<int64_t>(0, cores - taken);
  }

  // A step of many seconds says between layers that it has not died.
  void is_alive() const {
    if (lines) lines[mine].alive.store(nanoseconds(), std::memory_order_relaxed);
  }

  // From a thread of the engine, once: what is short goes first, of this process and of others. A
  // thread that computes without a break would else be left on its core until the kernel's next tick.
  // On Linux the nice value is a thread's own.
  void give_way() const {
#if defined(__linux__)
    if (lines && nice(NICENESS) == -1) return;  // no harm: it computes as before
#endif
  }

  std::atomic<int32_t>* helping() const { return lines ? &lines[mine].helping : nullptr; }

 private:
  static int64_t nanoseconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
  }
};
