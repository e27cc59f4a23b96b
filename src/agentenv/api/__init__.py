"""Services of their own: the tool server, which runs external tools outside the sandbox."""
