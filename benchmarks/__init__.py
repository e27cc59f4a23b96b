"""Benchmarks: `python -m benchmarks` measures the targets of docs/performance.md on this machine."""
