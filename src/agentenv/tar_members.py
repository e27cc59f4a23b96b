"""What Python's tarfile does not do by itself: stop at damage behind the first header, and keep nanoseconds."""

from __future__ import annotations

import tarfile
from typing import Self

from agentenv.tar_headers import BLOCK, NS_PER_S, time_ns


class StrictMember(tarfile.TarInfo):
    """For ``tarfile.open(tarinfo=StrictMember)``: a header that is damaged or cut raises tarfile.ReadError wherever it
    stands. By itself tarfile takes one behind the first for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        """See tarfile."""
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError as error:  # type: ignore[attr-defined]
            if tar.fileobj.read(BLOCK).strip(b"\0"):
                raise tarfile.ReadError(f"more follows after a lone block of zeros at byte {tar.offset}") from error
            raise
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"a header at byte {tar.offset} is damaged: {error}") from error


def time_text(ns: int) -> str:
    """A time for a pax header."""
    seconds, fraction = divmod(abs(ns), NS_PER_S)
    text = f"{seconds}.{fraction:09d}".rstrip("0").rstrip(".")
    return f"-{text}" if ns < 0 else text


def modified_ns(member: tarfile.TarInfo) -> int:
    """When a member was modified. Raises BrokenTarError."""
    exact = member.pax_headers.get("mtime")
    return time_ns(exact) if exact else int(member.mtime) * NS_PER_S


def set_modified_ns(member: tarfile.TarInfo, ns: int) -> None:
    """Set it, exactly in the PAX format."""
    member.mtime = ns // NS_PER_S
    if ns % NS_PER_S:
        member.pax_headers = {**member.pax_headers, "mtime": time_text(ns)}
