"""The builtin tools, run inside a slot."""
