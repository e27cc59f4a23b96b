"""The HTML report of a run: one self-contained page from ``rollouts.jsonl``."""

from agentenv.report.page import read_records, write_report

__all__ = ["read_records", "write_report"]
