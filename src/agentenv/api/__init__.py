"""The tool server, a separate service that runs external tools outside the sandbox."""
