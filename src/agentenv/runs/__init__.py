"""The directory of a run: what was asked for, what came of it, and every rollout (docs/runs.md)."""
