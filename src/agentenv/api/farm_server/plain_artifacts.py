"""Files of a slot for ``/artifacts``: which tool tells, and what its result says. Pure."""

from __future__ import annotations

import base64
import codecs
import gzip
import hashlib

from agentenv.wire import plain
from agentenv.wire.calls import CallResult
from agentenv.wire.tools import ArtifactsReply, ListFilesReply, ReadFileReply

_DEEP = 64


def reading(request: plain.ArtifactReadRequest) -> plain.PlainTool:
    """The call that reads the file."""
    part = {"offset": request.offset, "limit": request.max_bytes or plain.ARTIFACT_BYTES}
    return plain.PlainTool(name="read_file", arguments={"path": request.path, "binary": True, **part})


def read(result: CallResult, request: plain.ArtifactReadRequest) -> plain.ArtifactRead:
    """What it has read."""
    if not result.success:
        return plain.ArtifactRead(success=False, error=why(result), path=request.path, encoding=request.encoding)
    reply = ReadFileReply.model_validate(result.content)
    data, lossy = reply.data or b"", False
    if request.encoding == "text":
        text, data = decoded(data, whole=not reply.truncated)
        lossy = text.encode() != data
    else:
        text = base64.b64encode(data).decode()
    return plain.ArtifactRead(
        success=True,
        path=request.path,
        content=text,
        encoding=request.encoding,
        bytes=len(data),
        file_size=reply.size_bytes,
        truncated=reply.truncated or request.offset + len(data) < reply.size_bytes,
        lossy=lossy,
        sha256=hashlib.sha256(data).hexdigest() if request.include_sha256 else None,
    )


def decoded(data: bytes, *, whole: bool) -> tuple[str, bytes]:
    """The text of these bytes, and those of them that it stands for: a character that is cut at the end of a part is
    left for the next one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=whole)
    rest = len(decoder.getstate()[0])
    if rest == len(data) > 0:  # nothing but a part of a character fits
        return data.decode("utf-8", "replace"), data
    return text, data[: len(data) - rest]


def listing(request: plain.ArtifactListRequest) -> plain.PlainTool:
    """The call that lists the directory."""
    depth = _DEEP if request.recursive else 1
    arguments = {"path": request.path, "depth": depth, "limit": request.max_entries or plain.LISTED}
    return plain.PlainTool(name="list_files", arguments=arguments)


def listed(result: CallResult) -> plain.ArtifactList:
    """What it has listed."""
    if not result.success:
        return plain.ArtifactList(success=False, error=why(result))
    reply = ListFilesReply.model_validate(result.content)
    entries = tuple(
        plain.ArtifactEntry(
            path=entry.path, is_dir=entry.kind == "directory", size=entry.size_bytes, mtime=entry.modified_s
        )
        for entry in reply.entries
    )
    return plain.ArtifactList(success=True, entries=entries, truncated=reply.truncated)


def packing(request: plain.ArtifactArchiveRequest) -> plain.PlainTool:
    """The call that packs the files."""
    return plain.PlainTool(name="artifacts", arguments={"action": "archive", "path": request.path})


def packed(result: CallResult, request: plain.ArtifactArchiveRequest) -> plain.ArtifactArchive:
    """The archive, compressed: of the same files always the same. It may take a second."""
    if not result.success:
        return plain.ArtifactArchive(success=False, error=why(result), format=request.format)
    reply = ArtifactsReply.model_validate(result.content)
    data = gzip.compress(reply.data or b"", mtime=0)
    most = {
        "files": (len(reply.files), request.max_entries or plain.MAX_LISTED),
        "bytes": (len(data), request.max_bytes or plain.MAX_ARTIFACT_BYTES),
    }
    for what, (found, limit) in most.items():
        if found > limit:
            error = f"the archive has {found} {what}, at most {limit} are allowed"
            return plain.ArtifactArchive(success=False, error=error, format=request.format)
    return plain.ArtifactArchive(
        success=True,
        content=base64.b64encode(data).decode(),
        format=request.format,
        bytes=len(data),
        entry_count=len(reply.files),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def why(result: CallResult) -> str:
    """Why there are no such files."""
    return result.message or result.printed.strip() or f"exit code {result.exit_code}"
