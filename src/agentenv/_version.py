"""The package's version, apart from its public face so that every layer may import it."""

__version__ = "0.1.0"
