"""A container as a virtual machine of its own: the same supervisor and slots, behind a kernel of their own.

``python -m agentenv.sandbox.machine`` replaces ``python -m agentenv.sandbox``. :mod:`.guest` is what is given to
the guest, :mod:`.qemu` the machine, :mod:`.running` its life, ``__main__`` joins them. The files of the machine
(kernel, initrd, root) are made by `agentenv image machine` (docs/machines.md).
"""
