// How the engines of a host share its cores. The board is a page of shared memory with a line for
// each engine, which only its owner writes. worker/cores/core_board.py makes the file and decides;
// this code follows it.
//
// An engine that yields (prefill) leaves cores to urgent engines (decode) at once, and is never
// descheduled with work in hand: its helpers check the board before they take a piece of work. An
// urgent step waits some tens of microseconds until the helpers on its cores have finished their
// pieces. A thread that is descheduled in the middle of a piece would delay all others of its step.

#pragma once

#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

struct Line {
  std::atomic<int64_t> alive;  // when the running step was last seen alive, in nanoseconds of
                               // CLOCK_MONOTONIC; 0: none runs
  std::atomic<int32_t> urgent;  // its threads that never yield
  std::atomic<int32_t> helping;  // its threads, without the first, that have work in hand
  std::atomic<int64_t> busy_since;  // only for worker/cores/core_board.py
  char rest[40];
};
static_assert(sizeof(Line) == 64, "worker/cores/core_board.py packs it");

struct Board {
  Line* lines = nullptr;
  int64_t count = 0, mine = 0, cores = 0;

  static const int64_t STALE_NS = 5000000000;  // a dead engine's line counts no longer than this
  static const int NICENESS = 10;  // as in worker/cores/core_board.py

  // Number of helpers that a yielding step may use now.
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

  // Called between layers, so that a step of many seconds counts as alive.
  void is_alive() const {
    if (lines) lines[mine].alive.store(nanoseconds(), std::memory_order_relaxed);
  }

  // Called once by a thread of the engine: short work goes first, in this process and others.
  // Otherwise a thread that computes without a break would keep its core until the kernel's next
  // tick. On Linux the nice value applies to a single thread.
  void give_way() const {
#if defined(__linux__)
    if (lines && nice(NICENESS) == -1) return;  // harmless: it computes as before
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
