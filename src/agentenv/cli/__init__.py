"""The agentenv command, one file per verb."""
