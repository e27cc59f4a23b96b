"""The contents of a container: supervisor, server, slot agent."""
