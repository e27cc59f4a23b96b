"""What this machine offers slots, and what it lacks: facts are read, rules are pure."""
