# The image of a container that is a virtual machine: that of other containers, and a kernel. `agentenv image machine`
# builds it and writes its files (docs/machines.md). The only network the build uses is apt's.
ARG BASE=agentenv-sandbox:local
FROM ${BASE}
# Debian's kernel for machines of this kind; its first file system has the drivers of the guest's devices and no others.
# What could load a driver later is not kept.
RUN export DEBIAN_FRONTEND=noninteractive \
 && mkdir -p /etc/initramfs-tools/conf.d \
 && echo 'MODULES=list' >/etc/initramfs-tools/conf.d/machine \
 && apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends initramfs-tools iproute2 zstd >/dev/null \
 && printf '%s\n' virtio_pci virtio_blk virtio_net virtio_rng ext4 >>/etc/initramfs-tools/modules \
 && apt-get install -y -qq --no-install-recommends linux-image-cloud-amd64 >/dev/null \
 && mkdir /machine \
 && cp --dereference /boot/vmlinuz-* /machine/vmlinuz \
 && cp --dereference /boot/initrd.img-* /machine/initrd \
 && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* /usr/lib/modules /boot/* \
 && find / -xdev -perm /6000 -type f -exec chmod a-s {} +
