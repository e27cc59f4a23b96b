"""Tasks in others' formats: directories of Harbor and Terminal-Bench, SWE-style records. Needs ``agentenv[env]``."""
