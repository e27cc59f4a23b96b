"""What lives in a slot between calls: terminals, background processes, tmux.

Knows only the wire and the errors, and a port to whatever starts programs: the sandbox server and the
fake backend run the very same code over it.
"""
