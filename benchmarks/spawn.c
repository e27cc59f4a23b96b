/* The baseline: vfork + execve + wait of commands, `workers` processes at once, nothing else. Timed tools in Python
 * would charge their own cost to bash.
 * usage: spawn WORKERS CALLS PAUSE_US SLOW SEED READ_BYTES COMMAND [ARG...]
 *   CALLS calls by each worker, a pause before each; SLOW of them, at random places, are `sleep 5` instead of COMMAND and are
 *   not timed; with READ_BYTES > 0 the command's output is read through a pipe and must be that long.
 * Prints one latency in microseconds per line, then "total <seconds>". */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char *slow_command[] = {"/usr/bin/bash", "-c", "sleep 5", NULL};
static char buffer[1 << 16];

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static long drain(int from) {
  long total = 0;
  ssize_t got;
  while ((got = read(from, buffer, sizeof buffer)) > 0) total += got;
  return total;
}

static double timed_call(char **argv, long read_bytes) {
  int out[2] = {-1, -1};
  if (read_bytes && pipe2(out, O_CLOEXEC) < 0) exit(1);
  double started = now_us();
  pid_t pid = vfork();
  if (pid == 0) {
    if (read_bytes) dup2(out[1], 1);
    execv(argv[0], argv);
    _exit(127);
  }
  if (read_bytes) {
    close(out[1]);
    if (drain(out[0]) != read_bytes) exit(1);
    close(out[0]);
  }
  int status = 0;
  if (pid < 0 || waitpid(pid, &status, 0) < 0 || status != 0) exit(1);
  return now_us() - started;
}

static void work(double *latency_us, int calls, useconds_t pause_us, int slow, unsigned seed, long read_bytes,
                 char **argv) {
  for (int i = 0; i < calls; i++) {
    if (pause_us) usleep(pause_us);
    int is_slow = slow > 0 && (int)(rand_r(&seed) % (unsigned)(calls - i)) < slow;
    if (is_slow) {
      slow--;
      timed_call(slow_command, 0);
    }
    latency_us[i] = is_slow ? -1 : timed_call(argv, read_bytes);
  }
}

int main(int argc, char **argv) {
  if (argc < 8) return 2;
  int workers = atoi(argv[1]);
  int calls = atoi(argv[2]);
  useconds_t pause_us = (useconds_t)atoi(argv[3]);
  int slow = atoi(argv[4]);
  unsigned seed = (unsigned)atoi(argv[5]);
  long read_bytes = atol(argv[6]);
  size_t bytes = sizeof(double) * (size_t)workers * (size_t)calls;
  double *latency_us = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (latency_us == MAP_FAILED) return 1;
  double started = now_us();
  for (int w = 0; w < workers; w++) {
    pid_t pid = fork();
    if (pid < 0) return 1;
    if (pid == 0) {
      work(latency_us + w * calls, calls, pause_us, slow, seed + (unsigned)w, read_bytes, argv + 7);
      _exit(0);
    }
  }
  for (int w = 0; w < workers; w++) {
    int status = 0;
    if (wait(&status) < 0 || status != 0) return 1;
  }
  double total_s = (now_us() - started) / 1e6;
  for (int i = 0; i < workers * calls; i++)
    if (latency_us[i] >= 0) printf("%.1f\n", latency_us[i]);
  printf("total %.6f\n", total_s);
  return 0;
}
