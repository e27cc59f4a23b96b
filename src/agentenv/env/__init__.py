"""AgentEnv, an atropos environment. The only package that imports atroposlib or wandb."""

import logging

from agentenv.config import debug

# atropos imports transformers for its tokenizers, which warns at import, before any handler of ours is there.
logging.getLogger("transformers").addFilter(
    lambda record: debug() or not record.getMessage().startswith("PyTorch was not found")
)
