"""The HTML report of a run: one self-contained page from ``rollouts.jsonl``."""

from agentenv.report.page import write_report
from agentenv.runs.records import read_records

__all__ = ["read_records", "write_report"]
