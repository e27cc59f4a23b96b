"""The agent loop, its prompts, parsers and transcripts."""
