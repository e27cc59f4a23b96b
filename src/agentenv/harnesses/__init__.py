"""Adapters: agentenv as a sandbox of other people's harnesses (docs/harnesses.md). Each module imports its harness, and
is imported by it alone: nothing here is needed to install agentenv, and nothing of agentenv needs it."""
