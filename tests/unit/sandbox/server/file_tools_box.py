"""A workspace directory for tests of the file tools, which run the real slotfiles as an ordinary user."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv.sandbox.server.tools.files import FileOutcome, Finished, run_file_tool
from agentenv.sandbox.server.uploads import Upload
from agentenv.sandbox.slot_paths import SlotPaths
from agentenv.sandbox.slotagent.build import ensure_built
from agentenv.wire.tools import ArtifactsReply, ListFilesReply, ReadFileReply, WriteFileReply
from tests.unit.sandbox.identity import as_user

UID = 20999


class LocalRunner:
    """Runs slotfiles as an ordinary child; keeps nothing running."""

    def __init__(self, *, file_limit_bytes: int | None = None) -> None:
        self._file_limit_bytes = file_limit_bytes

    async def run(self, argv: Sequence[str], *, stdin: bytes | Upload | None = None, output_bytes: int) -> Finished:
        assert not isinstance(stdin, Upload)
        command = [*as_user(UID), *argv]
        if self._file_limit_bytes is not None:
            command = ["prlimit", f"--fsize={self._file_limit_bytes}", *command]
        done = await asyncio.to_thread(
            lambda: subprocess.run(
                [os.fsencode(part) for part in command], input=stdin or b"", capture_output=True, timeout=60
            )
        )
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        kept = done.stdout[:output_bytes]
        return Finished(code, kept, done.stderr, len(done.stdout) - len(kept))


class FixedRunner:
    """Answers with what a broken or hostile slot might print."""

    def __init__(self, finished: Finished) -> None:
        self.finished = finished

    async def run(self, argv: Sequence[str], *, stdin: bytes | Upload | None = None, output_bytes: int) -> Finished:
        return self.finished


class Box:
    """A workspace directory with secrets beside it, and the tools on it."""

    def __init__(self, top: Path) -> None:
        self.path = top / "workspace"
        self.path.mkdir(mode=0o700)
        self.outside = top / "outside"
        self.outside.mkdir()
        (self.outside / "secret").write_text("secret")
        top.chmod(0o755)
        for path in (self.path, self.outside, self.outside / "secret"):
            if os.geteuid() == 0:
                os.chown(path, UID, UID)
        program = top / "slotfiles"
        shutil.copy(ensure_built().files, program)  # a checkout may be where the other user cannot go
        self.program = (str(program), str(self.path))
        ripgrep = shutil.copy(ensure_built().ripgrep, top / "rg")
        self.paths = SlotPaths(
            workspace=str(self.path), files=str(program), beneath_workspace=True, ripgrep=str(ripgrep)
        )
        self.runner = LocalRunner()

    async def call(self, tool: str, **arguments: Any) -> FileOutcome:
        done = await run_file_tool(tool, arguments, self.runner, paths=self.paths)
        if not done.raw:
            return done
        assert done.content is not None
        whole = {name: bytes(raw).decode() if name == "text" else bytes(raw) for name, raw in done.raw.items()}
        return dataclasses.replace(done, content=done.content.model_copy(update=whole), raw={})

    async def read(self, path: str, **more: Any) -> ReadFileReply:
        done = await self.call("read_file", path=path, **more)
        assert isinstance(done.content, ReadFileReply), done
        return done.content

    async def write(self, path: str, text: str | None = None, **more: Any) -> WriteFileReply:
        done = await self.call("write_file", path=path, text=text, **more)
        assert isinstance(done.content, WriteFileReply), done
        return done.content

    async def listing(self, path: str = ".", **more: Any) -> ListFilesReply:
        done = await self.call("list_files", path=path, **more)
        assert isinstance(done.content, ListFilesReply), done
        return done.content

    async def names(self, path: str = ".", **more: Any) -> list[str]:
        return [entry.path for entry in (await self.listing(path, **more)).entries]

    async def archive(self, path: str = ".") -> ArtifactsReply:
        done = await self.call("artifacts", action="archive", path=path)
        assert isinstance(done.content, ArtifactsReply), done
        return done.content

    async def extract(self, data: bytes, path: str = ".") -> ArtifactsReply:
        done = await self.call("artifacts", action="extract", path=path, data=data)
        assert isinstance(done.content, ArtifactsReply), done
        return done.content

    def tree(self) -> dict[str, str]:
        """Every file below the workspace, with its content."""
        files = (path for path in sorted(self.path.rglob("*")) if not path.is_dir())
        return {str(path.relative_to(self.path)): path.read_text(errors="replace") for path in files}

    def give(self, top: Path) -> None:
        """A tree, to the user whom the tools run as."""
        if os.geteuid() == 0:
            for path in (top, *top.rglob("*")):
                os.chown(path, UID, UID, follow_symlinks=False)

    def make(self, path: str, content: str = "") -> Path:
        """A file of the workspace, made by somebody other than the tools."""
        file = self.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        if os.geteuid() == 0:
            for part in (file, *file.relative_to(self.path).parents):
                os.chown(self.path / part, UID, UID)
        return file


@pytest.fixture(name="box")
def box_fixture() -> Iterator[Box]:
    # Not tmp_path: its parents are 0700, and the tools run as another user.
    with tempfile.TemporaryDirectory() as top:
        yield Box(Path(top))


def make_tar(files: Mapping[str, bytes | tarfile.TarInfo], **more: Any) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", **more) as tar:
        for name, content in files.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return output.getvalue()


def tar_entry(name: str, kind: bytes, link: str = "", **more: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = link
    for field, value in more.items():
        setattr(member, field, value)
    return member
