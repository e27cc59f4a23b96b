"""State of a slot between calls: terminals, background processes, tmux.

Depends only on the wire and the errors, and on a host that starts programs: the sandbox server and the fake backend
run the same code.
"""
