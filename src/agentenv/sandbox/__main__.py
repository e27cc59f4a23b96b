"""``python -m agentenv.sandbox SPEC.json [--lifeline]``: one container."""

from __future__ import annotations

import gc
import sys

gc.set_threshold(20_000, 20, 50)  # before the imports, which make no garbage

from agentenv.sandbox.supervisor.launch import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
