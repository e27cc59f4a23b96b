"""A slot's tools as a server of the Model Context Protocol. The SDK of that name is imported by this package alone."""
