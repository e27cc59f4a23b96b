"""The directory of a run: made when its first rollout is about to start, locked as long as its process lives.

No process is needed to read one, and none to say that another was killed: its lock is free while its manifest says
``running``.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from agentenv.errors import ConfigError
from agentenv.locks import TRIES, TRY_PAUSE_S, is_locked, try_lock
from agentenv.runs import LAST
from agentenv.runs.manifest import FILE, LOCK, RunManifest, State, read_manifest

UPDATE_GAP_S: Final = 5.0
"""The least time between two manifests of a run that only differ in its results so far."""

LONGEST_NAME_BYTES: Final = 80
"""Of a run's name in that of its directory, to which the date is added."""

Shown = Literal["running", "finished", "failed", "interrupted", "killed"]


class RunDirectory:
    """A run's directory, of which this process holds the lock."""

    def __init__(self, path: Path, manifest: RunManifest, lock: int) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock
        self._written_s = 0.0

    @classmethod
    def made(cls, root: Path, name: str, manifest: RunManifest) -> Self:
        """A new directory ``root/NAME-DATE`` with this manifest. Raises: ConfigError when it cannot be made."""
        began = time.strftime("%Y%m%d-%H%M%S", time.gmtime(manifest.began_unix_s))
        stem, number = f"{file_name(name)}-{began}", 1
        try:
            while True:
                path = root / (stem if number == 1 else f"{stem}-{number}")
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    number += 1
            lock = try_lock(path / LOCK, create=True)
            assert lock is not None
            made = cls(path, manifest, lock)
            made._write()
        except OSError as error:
            reason = f"no directory for this run can be made in {root}: {error.strerror or error}"
            raise ConfigError("runs_dir", reason, next_step="name another one, or none with --env.runs_dir=") from error
        return made

    @classmethod
    def opened(cls, path: Path) -> Self:
        """The directory of a run that another process began. Raises: ConfigError when that process still runs, or when
        there is no run."""
        if path.is_relative_to(Path.cwd()):  # as it was named when it was made
            path = path.relative_to(Path.cwd())
        manifest_of(path)
        for _ in range(TRIES):
            try:
                lock = try_lock(path / LOCK, create=True)
                break
            except BlockingIOError:
                time.sleep(TRY_PAUSE_S)
            except OSError as error:
                raise ConfigError("RUN", f"{path} cannot be written: {error.strerror or error}") from error
        else:
            raise ConfigError("RUN", f"{path} still runs", next_step="stop it first")
        if lock is None:
            raise ConfigError("RUN", f"{path} is being removed")
        return cls(path, manifest_of(path), lock)

    def update(self, **changed: Any) -> None:
        """Change the manifest's fields, in the file as well. Raises: OSError; the file is then as it was."""
        self.manifest = self.manifest.model_copy(update=changed)
        self._write()

    def progressed(self, results: Callable[[], dict[str, Any]]) -> None:
        """Write down the results so far, at most every UPDATE_GAP_S; what cannot be written is left for the end."""
        if time.monotonic() - self._written_s >= UPDATE_GAP_S:
            with suppress(OSError):
                self.update(results=results())

    def _write(self) -> None:
        self._written_s = time.monotonic()
        replace(self.path / FILE, self.manifest.model_dump_json(indent=1).encode() + b"\n")

    def close(self) -> None:
        """Release the lock. Repeatable."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def replace(path: Path, content: bytes) -> None:
    """Write a file as a whole: readers see the old content or the new. Raises: OSError; the old one is then there."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(part).chmod(0o644)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def file_name(name: str) -> str:
    """The name with nothing in it that a file's name must not have: letters of any script, digits, ``_``, ``.`` and
    ``-`` stay."""
    kept = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", name)).strip("._-")
    return kept.encode()[:LONGEST_NAME_BYTES].decode(errors="ignore") or "run"


@dataclass(frozen=True)
class FoundRun:
    """A run as it lies on the disk."""

    path: Path
    manifest: RunManifest

    @property
    def state(self) -> Shown:
        """As in the manifest; ``killed`` when it says ``running`` and no process holds the lock."""
        state: State = self.manifest.state
        return "killed" if state == "running" and not self.is_running else state

    @property
    def is_running(self) -> bool:
        """Whether a process plays it now."""
        return is_locked(self.path / LOCK)

    @property
    def name(self) -> str:
        """Of its directory."""
        return self.path.name


def manifest_of(path: Path) -> RunManifest:
    """The manifest of a run's directory. Raises: ConfigError when there is none, or it cannot be read."""
    try:
        return read_manifest(path)
    except FileNotFoundError as error:
        raise ConfigError("RUN", f"{path} is no directory of a run: it has no {FILE}") from error
    except (OSError, ValueError) as error:
        raise ConfigError("RUN", f"{path / FILE} cannot be read: {str(error).splitlines()[0]}") from error


def runs_in(root: Path) -> Iterator[FoundRun]:
    """Every run in ``root`` that can be read, the oldest first."""
    found = []
    with suppress(OSError):
        for path in root.iterdir():
            with suppress(OSError, ValueError):
                found.append(FoundRun(path, read_manifest(path)))
    yield from sorted(found, key=lambda run: (run.manifest.began_unix_s, run.name))


def run_named(root: Path, name: str) -> FoundRun:
    """The run of this directory, name or id, of which a beginning is enough if no other has it; ``last``: the newest.

    Raises: ConfigError when there is none, or there are several.
    """
    if (Path(name) / FILE).is_file():
        return FoundRun(path := Path(name), manifest_of(path))
    found = list(runs_in(root))
    if not found:
        raise ConfigError("RUN", f"there is no run in {root}/", next_step="give its directory, or --runs-dir")
    if name == LAST:
        return found[-1]
    begun = unicodedata.normalize("NFC", name)
    exact = [run for run in found if begun in (run.name, run.manifest.id)]
    meant = exact or [run for run in found if run.name.startswith(begun) or run.manifest.id.startswith(begun)]
    meant = meant or [run for run in found if run.manifest.name == name]
    if len(meant) == 1:
        return meant[0]
    near = [run.name for run in (meant or found)][-5:]
    reason = f"{len(meant)} runs begin with {name!r}" if meant else f"no run in {root}/ is named {name!r}"
    raise ConfigError("RUN", reason, next_step=f"allowed: {LAST}, {', '.join(reversed(near))}")


def secrets_removed(document: dict[str, Any], secrets: frozenset[str]) -> dict[str, Any]:
    """Settings without those of these names, as JSON can have them."""
    kept: dict[str, Any] = json.loads(json.dumps(document, default=repr))
    return {name: value for name, value in kept.items() if name not in secrets}
