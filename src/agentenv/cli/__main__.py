"""``python -m agentenv.cli``: the ``agentenv`` command of this interpreter."""

from agentenv.cli import main

if __name__ == "__main__":
    main()
