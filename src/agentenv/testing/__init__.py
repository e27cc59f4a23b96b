"""Support for tests of environments: a scripted model server and a small tokenizer.

Both can be recognised: the model is called ``scripted``, the tokenizer ``agentenv-test-bytes``.
"""

from agentenv.testing.generate import TokenSpeaker
from agentenv.testing.script import Call, Failure, Player, Reply, Script, Turn, load_script
from agentenv.testing.scripted_policy import ScriptedPolicy
from agentenv.testing.tokenizer import build_tokenizer

__all__ = [
    "Call",
    "Failure",
    "Player",
    "Reply",
    "Script",
    "ScriptedPolicy",
    "TokenSpeaker",
    "Turn",
    "build_tokenizer",
    "load_script",
]
