"""Parsers of tool calls, one file per model family."""
