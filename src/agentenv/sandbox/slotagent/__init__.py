"""The slot agent (PID 1 of every slot): three static C programs, their build, and the codec to talk to them."""
