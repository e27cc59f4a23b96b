"""AgentEnv, an atropos environment. The only package that imports atroposlib or wandb."""
