"""How a container shows images to its slots: decided once, at its start, from what this kernel and the store can.

| format | an image is | needs |
|---|---|---|
| ``erofs`` | its index and its layers' tars, mounted as they are | Linux 6.12 |
| ``tree`` | its layers, unpacked once for the node, shown to each slot under its own ids | overlays of those (5.19) |
| ``shifted`` | the same, under one range of ids that all slots of the node share | mount_setattr (5.12) |

A container that is root of a user namespace with few ids (an engine's ``userns-remap``) can have ``shifted`` only, with
a lean map (:class:`~agentenv.sandbox.supervisor.user_namespace.LeanIds`).

Pure: :mod:`~agentenv.sandbox.supervisor.image_probes` tries what these need, because distributions change kernels and
versions prove little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from agentenv.sandbox.supervisor.user_namespace import IDS_OF_TREES, LEAN_IDS, NOBODY, ImageIds, LeanIds
from agentenv.wire.roots import Writable
from agentenv.wire.spec import ImageFormat

Format = Literal["erofs", "tree", "shifted"]

_ORDER: Final[tuple[Format, ...]] = ("erofs", "tree", "shifted")
_NEEDS: Final[Mapping[Format, str]] = {
    "erofs": "Linux 6.12 or newer, and the store on a disk's file system",
    "tree": "Linux 5.19 or newer, and the store on ext4, xfs or btrfs",
    "shifted": "Linux 5.12 or newer",
}
_MEMORY_NEEDS: Final = "in memory it needs Linux 6.6 or newer"
"""Since then files in memory have the attributes in which overlayfs notes what was deleted and replaced."""
_GVISOR: Final = "#1 SMP Sun Jan 10 15:06:54 PST 2016"
"""What gVisor's ``/proc/version`` contains on every machine (pkg/sentry/syscalls/linux: ``LinuxVersion``)."""


@dataclass(frozen=True)
class Probes:
    """What was tried, each as the reason why it does not work; empty: it does."""

    basics: str = ""
    """Ids of their own for slots, and an overlay that the root of a user namespace puts together."""
    formats: Mapping[Format, str] = field(default_factory=dict)
    """Layers in each format, below such an overlay."""
    memory: str = ""
    """A writable layer in memory, with the attributes in which overlayfs keeps what was deleted and replaced."""


@dataclass(frozen=True)
class ImageSupport:
    """What the slots of a container get."""

    format: Format | None
    """None: plain slots only, because of ``refused``."""
    writable: tuple[Writable, ...] = ()
    """Where what a slot writes may lie."""
    weaker: tuple[str, ...] = ()
    """What is less than with ``erofs`` and a layer in memory, one sentence each."""
    refused: str = ""
    no_disk: str = ""
    """Why no writable layer may lie on the disk, whatever that is; empty if it may."""
    ids: ImageIds = IDS_OF_TREES
    """Those of unpacked layers, and of all slots with ``shifted``."""

    @property
    def no_memory(self) -> str:
        """Why no writable layer may lie in memory; empty if it may."""
        return "" if self.format is None or "memory" in self.writable else self.weaker[-1]


NO_NEW_PRIVILEGES: Final = (
    "programs of images become root or other users (su, sudo, apt), which no_new_privs forbids here: start the "
    "container without no-new-privileges (docker/README.md)"
)
FEW_IDS: Final = (
    "the container is in a user namespace with few ids (userns-remap, or an ordinary user's), which "
    "cannot mount files under other ids"
)
_LEAN: Final = (
    f"Image slots have only the users and groups 0 to {LEAN_IDS - 1} and {NOBODY}: a process cannot become "
    f"another user, and an image's files of other users belong to {NOBODY}."
)
_LEAN_DISK: Final = (
    "only the machine's root may mount a file system of a disk, not root of a user namespace (in docker: --userns=host)"
)
NO_STORE: Final = ImageSupport(None)
"""Of a container without a store, which reports that itself."""


def without_probes(one_id: str, ids: ImageIds | None, version: str, status: str) -> str:
    """Why a container cannot have image slots, whatever its kernel supports; empty if probes have to decide.
    ``one_id``: why it has one id only, if that is so. ``ids``: those of unpacked layers; None: there are too few
    (id_ranges.ids_of_trees). ``version`` and ``status`` are the texts of /proc/version and /proc/self/status."""
    if _GVISOR in version:
        return "gVisor cannot mount images under a slot's own ids: use runc, or a virtual machine (Kata)"
    if one_id:
        return f"the users of an image need several ids, and this container has one: {one_id}"
    if ids is None:
        lean = LeanIds()
        return (
            f"slots of images need the ids {lean.first} to {lean.first + lean.count - 1}, which the container's user "
            "namespace does not have: map 65536 ids (/etc/subuid and /etc/subgid), or start it with --userns=host"
        )
    return NO_NEW_PRIVILEGES if may_not_gain_privileges(status) else ""


def may_not_gain_privileges(status: str) -> bool:
    """Whether a process has no_new_privs, by the text of its /proc/PID/status."""
    return any(line.split() == ["NoNewPrivs:", "1"] for line in status.splitlines())


def decide(found: Probes, wanted: ImageFormat = "auto", ids: ImageIds = IDS_OF_TREES) -> ImageSupport:
    """The format that needs least disk and weakens least, among those that work; only ``wanted``, if one is named.
    ``ids``: of unpacked layers."""
    if found.basics:
        return ImageSupport(None, refused=found.basics)
    order = _ORDER if wanted == "auto" else (wanted,)
    works = next((one for one in order if not found.formats.get(one, "not tried")), None)
    if works is None:
        reasons = "; ".join(f"{one} (needs {_NEEDS[one]}): {found.formats.get(one, 'not tried')}" for one in order)
        named = "" if wanted == "auto" else f"image_format = {wanted}, but "
        return ImageSupport(None, refused=f"{named}images cannot be mounted here: {reasons}")
    because = "image_format requires it" if wanted != "auto" else found.formats.get("erofs", "")
    weaker = []
    if works != "erofs":
        weaker.append(
            f"Images are unpacked on the node's disk ({because}): the first slot of an image waits for that, and each "
            "file takes an inode."
        )
    if works == "shifted":
        mapped = found.formats.get("tree", "") if wanted == "auto" else because
        weaker.append(
            f"All image slots of the node have the same user ids outside ({mapped}): namespaces alone keep them apart, "
            "and they share the quotas of those users."
        )
    if isinstance(ids, LeanIds):
        if found.memory:
            return ImageSupport(
                None, refused=f"there is no place for what slots write: {_no_memory(found)}; {_LEAN_DISK}"
            )
        return ImageSupport(works, ("memory",), (*weaker, _LEAN), no_disk=_LEAN_DISK, ids=ids)
    if found.memory:
        weaker.append(f"Image slots write to the disk only ({_no_memory(found)}).")
    return ImageSupport(works, ("disk",) if found.memory else ("memory", "disk"), tuple(weaker))


def _no_memory(found: Probes) -> str:
    return f"{_MEMORY_NEEDS}; here: {found.memory}"
