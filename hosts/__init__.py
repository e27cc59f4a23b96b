"""``make hosts``: agentenv on whole machines with Debian's own kernels, systemd, AppArmor and cgroups, in QEMU."""
