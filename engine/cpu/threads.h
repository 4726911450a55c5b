// A pool of threads that take the parts of a loop one by one.
//
// States of a loop: open (parts are left) → closed (all were taken) → done (no thread is inside).
// The caller takes parts like the helpers, and waits only for threads that hold a part. So a helper
// that the kernel descheduled before it took one delays no other thread. Waits spin for some
// microseconds and then sleep: on a shared host the core is then free for others.
//
// With a board, helpers leave their cores to more urgent engines of the host between two parts.
//
// Owned by one caller. Only `run` may be called, by one thread at a time.

#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "board.h"

class Threads {
 public:
  typedef std::function<void(long part)> Body;

  // Call it between runs. `yields`: whether helpers leave when other engines are more urgent.
  void share(const Board& board, bool yields) {
    board_ = board;
    yields_ = yields;
  }

  // Shows the other engines that this one's step continues.
  void is_alive() const { board_.is_alive(); }

  ~Threads() {
    leaving_ = true;
    loop_++;
    loop_.notify_all();
    for (auto& thread : helpers_) thread.join();
  }

  // Calls body(0) … body(count - 1) with up to `threads` threads.
  void run(long count, int threads, const Body& body) {
    if (threads <= 1 || count <= 1) {
      for (long i = 0; i < count; i++) body(i);
      return;
    }
    while ((int)helpers_.size() < threads - 1) {
      const int number = (int)helpers_.size() + 1;
      helpers_.emplace_back([this, number] { help(number); });
    }
    body_ = &body;
    count_ = count;
    threads_ = threads;
    next_.store(0);
    open_.store(true);
    loop_++;
    if (sleeping_.load() && helpers() > 0) loop_.notify_all();
    work([] { return true; });
    open_.store(false);
    for (int inside, tries = 0; (inside = inside_.load());)
      if (++tries < SPINS) pause();
      else inside_.wait(inside);
  }

 private:
  static const int SPINS = 2000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  int helpers() const { return yields_ ? board_.helpers() : INT32_MAX; }

  template <class May>
  void work(May&& may) {
    for (long i; may() && (i = next_.fetch_add(1)) < count_;) (*body_)(i);
  }

  // Set before the check: an urgent engine announces itself, and then checks which helpers run.
  void lend_hand(int number) {
    std::atomic<int32_t>* helping = board_.helping();
    if (helping) (*helping)++;
    work([&] { return number <= helpers(); });
    if (helping) (*helping)--;
  }

  void help(int number) {
    bool gives_way = false;
    for (unsigned seen = 0;;) {
      for (int tries = 0; loop_.load() == seen && tries < SPINS; tries++) pause();
      if (loop_.load() == seen) {
        sleeping_++;
        loop_.wait(seen);
        sleeping_--;
      }
      seen = loop_.load();
      if (leaving_) return;
      // Counted before the check: the caller closes the loop and then waits for threads inside.
      inside_++;
      if (open_.load() && number < threads_) {
        if (!gives_way && (gives_way = board_.lines)) board_.give_way();
        lend_hand(number);
      }
      if (--inside_ == 0) inside_.notify_one();
    }
  }

  std::vector<std::thread> helpers_;
  const Body* body_ = nullptr;
  long count_ = 0;
  int threads_ = 0;
  Board board_;
  bool yields_ = false;
  std::atomic<long> next_{0};
  std::atomic<bool> open_{false}, leaving_{false};
  std::atomic<unsigned> loop_{0};
  std::atomic<int> inside_{0}, sleeping_{0};
};
