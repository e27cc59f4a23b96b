"""Machines whose roots are directory trees, and whose commands really run: in bubblewrap, with this machine's /usr.

Owners are kept beside the tree, so that no test needs root.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from agentenv.builder.machine import DEFAULT_PATH, BaseImage, ImageConfig, Machine, Seen, Start
from agentenv.errors import ConfigError

Owners = dict[str, tuple[int, int]]

PASSWD = "root:x:0:0:root:/root:/bin/sh\napp:x:1001:1002:an app:/home/app:/bin/sh\n"
GROUPS = "root:x:0:\nstaff:x:50:app\n"


@dataclass
class Tree:
    """A root: its directory, and who owns what was not root's."""

    path: Path
    owners: Owners = field(default_factory=dict)

    def copied(self, path: Path) -> Tree:
        subprocess.run(["cp", "-a", self.path, path], check=True)  # hard links too
        return Tree(path, dict(self.owners))


@dataclass
class TreeMachine:
    """One machine."""

    tree: Tree
    machines: TreeMachines

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        user: str,
        cwd: str,
        timeout_s: float,
        on_output: Callable[[bytes], None],
    ) -> int | None:
        self.machines.ran.append((tuple(argv), dict(env), user, cwd))
        walls = ["--bind", str(self.tree.path), "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        who = ["--unshare-user", "--uid", user.partition(":")[0] or "0"]
        command = ["bwrap", *walls, *who, "--unshare-pid", "--die-with-parent", "--clearenv", "--chdir", cwd]
        command += [word for name, value in env.items() for word in ("--setenv", name, value)]
        process = await asyncio.create_subprocess_exec(
            *command,
            "--",
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while output := await process.stdout.read(65536):
                    on_output(output)
                return await process.wait()
        except TimeoutError:
            process.kill()
            await process.communicate()
            return None

    async def put(self, stream: IO[bytes], at: str, *, owner: tuple[int, int], mode: int) -> None:
        base = self._made(at, owner, mode)
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                self._put(archive, member, base)

    async def look(self, path: str) -> Seen:
        real = self._real(path)
        on_disk = self.tree.path / real.lstrip("/")
        kind = "directory" if on_disk.is_dir() else "file" if on_disk.exists() else "missing"
        return Seen(kind, real)  # type: ignore[arg-type]

    async def names(self, directory: str) -> Sequence[tuple[str, bool]]:
        entries = (self.tree.path / self._real(directory).lstrip("/")).iterdir()
        return [(entry.name, entry.is_dir() and not entry.is_symlink()) for entry in entries]

    async def get(self, path: str) -> IO[bytes]:
        on_disk = self.tree.path / self._real(path).lstrip("/")
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            found = sorted(on_disk.rglob("*")) if on_disk.is_dir() else [on_disk]
            for entry in found:
                name = str(entry.relative_to(on_disk if on_disk.is_dir() else on_disk.parent))
                member = archive.gettarinfo(entry, name)
                member.uid, member.gid = self.owner(f"/{entry.relative_to(self.tree.path)}")
                with entry.open("rb") if member.isreg() else io.BytesIO() as content:
                    archive.addfile(member, content)
        return io.BytesIO(out.getvalue())

    async def checkpoint(self) -> str:
        return self.machines.keep(self.tree)

    async def commit(self, config: ImageConfig) -> str:
        digest = f"sha256:{self.machines.keep(self.tree)}"
        self.machines.committed[digest] = (self.machines.kept[digest.removeprefix("sha256:")], config)
        return digest

    def owner(self, path: str) -> tuple[int, int]:
        return self.tree.owners.get(path, (0, 0))

    def _real(self, path: str) -> str:
        """The path as chroot would follow it, as far as it exists."""
        done: list[str] = []
        waiting = [part for part in reversed(path.split("/")) if part]
        for _ in range(200):
            if not waiting:
                return "/" + "/".join(done)
            part = waiting.pop()
            if part == "..":
                done = done[:-1]
                continue
            on_disk = self.tree.path.joinpath(*done, part)
            if on_disk.is_symlink():
                target = str(on_disk.readlink())
                done = [] if target.startswith("/") else done
                waiting += [step for step in reversed(target.split("/")) if step not in ("", ".")]
            else:
                done.append(part)
        raise OSError(errno.ELOOP, "too many links", path)

    def _made(self, at: str, owner: tuple[int, int], mode: int) -> str:
        real = self._real(at)
        path = self.tree.path
        for part in filter(None, real.split("/")):
            path /= part
            if not path.exists():
                path.mkdir()
                path.chmod(mode)
                self.tree.owners[f"/{path.relative_to(self.tree.path)}"] = owner
            elif not path.is_dir():
                raise NotADirectoryError(f"{path.name} is not a directory")
        return real

    def _put(self, archive: tarfile.TarFile, member: tarfile.TarInfo, base: str) -> None:
        inside = f"{base.rstrip('/')}/{member.name}"
        path = self.tree.path / inside.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.isdir() and path.is_dir() and not path.is_symlink():
            pass
        elif member.isdir():
            path.mkdir()
        else:
            if path.is_dir() and not path.is_symlink():
                raise IsADirectoryError(f"{inside} is a directory")
            path.unlink(missing_ok=True)
            self._write(archive, member, path, base)
        if not member.issym():
            path.chmod(member.mode)
        os.utime(path, (float(member.mtime), float(member.mtime)), follow_symlinks=False)
        self.tree.owners[inside] = (member.uid, member.gid)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, base: str) -> None:
        if member.issym():
            path.symlink_to(member.linkname)
        elif member.islnk():
            path.hardlink_to(self.tree.path / base.lstrip("/") / member.linkname)
        else:
            content = archive.extractfile(member)
            assert content is not None
            path.write_bytes(content.read())


@dataclass
class TreeMachines:
    """Where they come from; ``directory`` holds all trees. ``base`` is an image that can run commands."""

    directory: Path
    images: dict[str, tuple[str, ImageConfig]] = field(default_factory=dict)
    kept: dict[str, Tree] = field(default_factory=dict)
    committed: dict[str, tuple[Tree, ImageConfig]] = field(default_factory=dict)
    ran: list[tuple[tuple[str, ...], dict[str, str], str, str]] = field(default_factory=list)
    opened: list[Start] = field(default_factory=list)
    open_now: int = 0

    def __post_init__(self) -> None:
        tree = Tree(self._new())
        tree.path.mkdir(parents=True)
        for name in ("usr", "proc", "dev", "tmp", "root", "etc", "srv"):
            (tree.path / name).mkdir()
        for name in ("bin", "sbin", "lib", "lib64"):
            (tree.path / name).symlink_to(f"usr/{name}")
        (tree.path / "etc/passwd").write_text(PASSWD)
        (tree.path / "etc/group").write_text(GROUPS)
        self.add_image("base", tree, ImageConfig(env=(("PATH", DEFAULT_PATH),), cmd=("bash",)))

    def add_image(self, reference: str, tree: Tree, config: ImageConfig) -> None:
        digest = f"sha256:{reference}"
        self.images[reference] = (digest, config)
        self.committed[digest] = (tree, config)

    def keep(self, tree: Tree) -> str:
        name = f"kept-{len(self.kept)}"
        self.kept[name] = tree.copied(self._new())
        return name

    def built(self, digest: str) -> Tree:
        return self.committed[digest][0]

    def config(self, digest: str) -> ImageConfig:
        return self.committed[digest][1]

    async def resolve(self, reference: str) -> BaseImage:
        if reference not in self.images:
            raise ConfigError("image", f"there is no {reference}", next_step="name another")
        return BaseImage(*self.images[reference])

    async def holds(self, start: Start) -> bool:
        return start.image in self.committed or start.checkpoint in self.kept

    def open(self, start: Start) -> AbstractAsyncContextManager[Machine]:
        return self._opened(start)

    @asynccontextmanager
    async def _opened(self, start: Start) -> AsyncIterator[Machine]:
        self.opened.append(start)
        self.open_now += 1
        path = self._new()
        if start.image or start.checkpoint:
            known = self.committed[start.image][0] if start.image else self.kept[start.checkpoint]
            tree = known.copied(path)
        else:
            tree = Tree(path)
            path.mkdir()
        try:
            yield TreeMachine(tree, self)
        finally:
            self.open_now -= 1
            shutil.rmtree(path)

    def _new(self) -> Path:
        self._count = getattr(self, "_count", 0) + 1
        return self.directory / f"tree-{self._count}"


def mode_of(path: Path) -> int:
    """Permission bits, of a link itself."""
    return stat.S_IMODE(path.lstat().st_mode)
