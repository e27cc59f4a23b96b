"""Images of this machine's Docker engine. The docker SDK (``agentenv[farm]``) is imported at first use."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError, ImageUnavailableError, missing_extra
from agentenv.image.progress import BuildStep, Report
from agentenv.store.layers import Blob
from agentenv.store.layout import check_room
from agentenv.store.reference import is_digest
from agentenv.store.sources import SourceImage

_TIMEOUT_S = 1800


@contextmanager
def engine_image(name: str) -> Iterator[Any]:
    """The engine's image of a name or id, as the SDK has it, while the connection is open.

    Raises ConfigError (``image``) when there is none of that name, MissingExtraError; SandboxUnavailableError when no
    engine answers.
    """
    try:
        from docker.errors import DockerException, ImageNotFound

        from agentenv.image.engine import connect
    except ModuleNotFoundError as error:
        raise missing_extra("docker-daemon:", error) or error from None
    with contextlib.closing(connect(timeout_s=_TIMEOUT_S)) as client:
        try:
            yield client.images.get(name)
        except ImageNotFound:
            raise ConfigError(
                "image", f"there is no image {name} in the Docker engine", next_step=f"docker pull {name}"
            ) from None
        except DockerException as error:
            raise ImageUnavailableError(
                f"the Docker engine failed: {error}", next_step="see the engine's log"
            ) from error


def without_layers(image: Any, stored: Callable[[str], bool]) -> SourceImage | None:
    """The image without exporting it, if all its layers are ``stored``."""
    diff_ids = image.attrs["RootFS"].get("Layers") or []
    if not all(is_digest(diff_id) and stored(diff_id) for diff_id in diff_ids):
        return None
    config = {
        "architecture": image.attrs["Architecture"],
        "os": image.attrs["Os"],
        "rootfs": {"diff_ids": diff_ids},
        "config": image.attrs["Config"],
    }
    return SourceImage(json.dumps(config).encode(), tuple(Blob(_removed, 0) for _ in diff_ids))


def _removed() -> Iterator[bytes]:
    raise ImageUnavailableError("a layer of the image was removed from the store meanwhile", next_step="try again")


def save(image: Any, name: str, directory: Path, report: Report) -> Path:
    """Write the archive that ``docker save`` writes into a directory. It holds this image only."""
    path = directory / "image.tar"
    done = 0
    with path.open("wb") as target:
        for chunk in image.save():
            check_room(target.fileno(), len(chunk))
            target.write(chunk)
            done += len(chunk)
            report(BuildStep("export", name, done=done))
    return path
