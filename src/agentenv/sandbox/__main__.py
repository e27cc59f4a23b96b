"""``python -m agentenv.sandbox SPEC.json [--lifeline]``: one container."""

from __future__ import annotations

import sys

from agentenv.sandbox.supervisor.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
