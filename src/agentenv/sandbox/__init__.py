"""What runs inside a container: supervisor, server, slot agent."""
