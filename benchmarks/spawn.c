/* The baseline: vfork + execve + wait of a command, `workers` processes at once, nothing else.
 * usage: spawn WORKERS CALLS PAUSE_US COMMAND [ARG...]  (the pause is before each call) -> prints one latency in microseconds per line, then
 * "total <seconds>". Timed tools in Python would charge their own cost to bash. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void work(double *latency_us, int calls, useconds_t pause_us, char **argv) {
  for (int i = 0; i < calls; i++) {
    if (pause_us) usleep(pause_us);
    double started = now_us();
    pid_t pid = vfork();
    if (pid == 0) {
      execv(argv[0], argv);
      _exit(127);
    }
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) < 0 || status != 0) exit(1);
    latency_us[i] = now_us() - started;
  }
}

int main(int argc, char **argv) {
  if (argc < 5) return 2;
  int workers = atoi(argv[1]);
  int calls = atoi(argv[2]);
  useconds_t pause_us = (useconds_t)atoi(argv[3]);
  size_t bytes = sizeof(double) * (size_t)workers * (size_t)calls;
  double *latency_us = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (latency_us == MAP_FAILED) return 1;
  double started = now_us();
  for (int w = 0; w < workers; w++) {
    pid_t pid = fork();
    if (pid < 0) return 1;
    if (pid == 0) {
      work(latency_us + w * calls, calls, pause_us, argv + 4);
      _exit(0);
    }
  }
  for (int w = 0; w < workers; w++) {
    int status = 0;
    if (wait(&status) < 0 || status != 0) return 1;
  }
  double total_s = (now_us() - started) / 1e6;
  for (int i = 0; i < workers * calls; i++) printf("%.1f\n", latency_us[i]);
  printf("total %.6f\n", total_s);
  return 0;
}
