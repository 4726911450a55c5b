/* Adds an offset to what the wall clock shows, and to the time of the boot in /proc/stat, which the
 * kernel computes of that clock; the monotonic clock is left alone.
 *
 * Loaded by LD_PRELOAD. The offset, in nanoseconds, is the first eight bytes of the file that
 * CHAOS_CLOCK names, which stays mapped: it may change at any time. The kernel knows nothing of it,
 * so that deadlines on the wall clock are turned back before they are handed to it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *offset_at;
static const int64_t SECOND = 1000000000;

__attribute__((constructor)) static void map_offset(void) {
  const char *path = getenv("CHAOS_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (page != MAP_FAILED) offset_at = page;
}

static int64_t offset(void) { return offset_at ? *offset_at : 0; }

static void move(struct timespec *at, int64_t by) {
  int64_t whole = (int64_t)at->tv_sec * SECOND + at->tv_nsec + by;
  if (whole < 0) whole = 0;
  at->tv_sec = whole / SECOND;
  at->tv_nsec = whole % SECOND;
}

static int is_wall(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, at);
  if (!failed && is_wall(clock)) move(at, offset());
  return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  (void)zone;
  struct timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}

/* A deadline as the kernel's clock has it. One that was made on the monotonic clock is years before
 * any that was made on the wall clock, and stays as it is. */
static struct timespec for_kernel(const struct timespec *until) {
  static const time_t A_WALL_CLOCK_SHOWS = 1000000000;
  struct timespec turned = *until;
  if (turned.tv_sec > A_WALL_CLOCK_SHOWS) move(&turned, -offset());
  return turned;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  struct timespec turned = for_kernel(until);
  return real(condition, mutex, &turned);
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
  struct timespec turned = for_kernel(until);
  return real(condition, mutex, clock, &turned);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex,
                            const struct timespec *restrict until) {
  static int (*real)(pthread_mutex_t *, const struct timespec *);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  struct timespec turned = for_kernel(until);
  return real(mutex, &turned);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  static int (*real)(sem_t *, const struct timespec *);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec turned = for_kernel(until);
  return real(semaphore, &turned);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock,
                  const struct timespec *restrict until) {
  static int (*real)(sem_t *, clockid_t, const struct timespec *);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "sem_clockwait");
  struct timespec turned = for_kernel(until);
  return real(semaphore, clock, &turned);
}

/* Locks that are made of futexes by hand have absolute deadlines too. */
long syscall(long number, ...) {
  static long (*real)(long, ...);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "syscall");
  va_list given;
  va_start(given, number);
  long a[6];
  for (int place = 0; place < 6; ++place) a[place] = va_arg(given, long);
  va_end(given);
  struct timespec turned;
  if (number == SYS_futex && a[3] && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET &&
      (a[1] & FUTEX_CLOCK_REALTIME)) {
    turned = for_kernel((const struct timespec *)a[3]);
    a[3] = (long)&turned;
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* /proc/stat as it would be if the machine's clock had been set: a copy in memory, whose line
 * "btime <seconds>" is turned. Answers a descriptor, or -1 where it cannot be made. */
static int turned_stat(int flags) {
  static const char LINE[] = "\nbtime ";
  int source = (int)syscall(SYS_openat, AT_FDCWD, "/proc/stat", O_RDONLY | O_CLOEXEC, 0);
  int copy = memfd_create("stat", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
  char *text = NULL;
  size_t size = 0;
  FILE *made = source < 0 || copy < 0 ? NULL : open_memstream(&text, &size);
  char piece[4096];
  ssize_t got = 0;
  while (made && (got = read(source, piece, sizeof piece)) > 0) fwrite(piece, 1, got, made);
  int is_good = made && !fclose(made) && !got;
  char *line = is_good ? strstr(text, LINE) : NULL;
  char *end = NULL;
  if (line) {
    long long boot = strtoll(line + sizeof LINE - 1, &end, 10) + offset() / SECOND;
    int begins = (int)(line - text);
    is_good = dprintf(copy, "%.*s%s%lld%s", begins, text, LINE, boot, end) > 0;
  }
  free(text);
  if (source >= 0) close(source);
  if (line && is_good && !lseek(copy, 0, SEEK_SET)) return copy;
  if (copy >= 0) close(copy);
  return -1;
}

static int is_turned(const char *path, int flags) {
  return offset() && (flags & O_ACCMODE) == O_RDONLY && !strcmp(path, "/proc/stat");
}

#define OPEN(name)                                                         \
  int name(const char *path, int flags, ...) {                             \
    static int (*real)(const char *, int, ...);                            \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);                  \
    va_list given;                                                         \
    va_start(given, flags);                                                \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(given, mode_t) : 0; \
    va_end(given);                                                         \
    int turned = is_turned(path, flags) ? turned_stat(flags) : -1;         \
    return turned < 0 ? real(path, flags, mode) : turned;                  \
  }

OPEN(open)
OPEN(open64)

#define FOPEN(name)                                                     \
  FILE *name(const char *restrict path, const char *restrict mode) {    \
    static FILE *(*real)(const char *, const char *);                   \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);               \
    int reads = mode[0] == 'r' && !strchr(mode, '+');                   \
    int turned = reads && is_turned(path, O_RDONLY) ? turned_stat(0) : -1; \
    return turned < 0 ? real(path, mode) : fdopen(turned, mode);        \
  }

FOPEN(fopen)
FOPEN(fopen64)
