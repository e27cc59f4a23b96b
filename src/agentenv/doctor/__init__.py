"""Checks of a machine's abilities: facts are read, rules are pure."""
