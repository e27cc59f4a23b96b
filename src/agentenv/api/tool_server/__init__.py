"""The tool server: external tools, run outside every slot with a network and secrets the policy never sees."""
