"""Backends: what starts and stops containers."""
