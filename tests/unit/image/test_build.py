"""When an image is built, from what base, and how a failing build is told; the engine is a stand-in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError, ImageNotFound

from agentenv.errors import SandboxUnavailableError
from agentenv.image import LABEL_CONTENT, BuildStep, base, ensure, silent
from agentenv.image.base import FROM_REGISTRY, MADE_HERE, base_image, mmdebstrap_argv


class Image:
    def __init__(self, number: int, labels: dict[str, str]) -> None:
        self.id = f"sha256:{number}"
        self.labels = labels
        self.attrs = {"Size": 1000}


class Engine:
    """As much of ``docker.DockerClient`` as is used; ``lines`` is what the next build streams."""

    def __init__(self, *, registry: bool = False) -> None:
        self.images = self
        self.api = self
        self.known: dict[str, Image] = {}
        self.unnamed: list[Image] = []
        self.builds: list[dict[str, Any]] = []
        self.removed: list[str] = []
        self.imported: list[str] = []
        self.lines: list[dict[str, str]] = [
            {"stream": "Step 1/2 : FROM x\n"},
            {"stream": "Step 2/2 : COPY\n"},
        ]
        self._registry = registry

    def get(self, name: str) -> Image:
        if name not in self.known:
            raise ImageNotFound(name)
        return self.known[name]

    def pull(self, name: str) -> None:
        if not self._registry:
            raise APIError("no such host")
        self.known[name] = Image(0, {})

    def import_image_from_file(self, file: str, repository: str, tag: str) -> None:
        self.imported.append(file)
        self.known[f"{repository}:{tag}"] = Image(0, {})

    def build(self, **asked: Any) -> Iterator[dict[str, str]]:
        self.builds.append(asked)
        yield from self.lines
        if before := self.known.get(asked["tag"]):
            self.unnamed.append(before)
        self.known[asked["tag"]] = Image(len(self.builds), asked["labels"])

    def list(self, filters: dict[str, Any]) -> list[Image]:
        assert filters == {"dangling": True, "label": LABEL_CONTENT}
        return self.unnamed

    def remove(self, image_id: str) -> None:
        self.removed.append(image_id)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own with the packages in it, so that nothing is fetched."""
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path))
    site = tmp_path / "site"
    site.mkdir()
    (site / "aiohttp.py").touch()
    monkeypatch.setattr(ensure, "site_directory", lambda cache, pins: site)
    return tmp_path


@pytest.fixture
def engine() -> Engine:
    found = Engine()
    found.known[MADE_HERE] = Image(0, {})
    return found


@pytest.mark.usefixtures("cache")
def test_missing_image_is_built_once_and_then_current(engine: Engine) -> None:
    steps: list[BuildStep] = []
    first = ensure.ensure_image(client=engine, report=steps.append)
    second = ensure.ensure_image(client=engine)

    assert (first.present, first.stale, first.base) == (True, False, MADE_HERE)
    assert first.content == first.wanted
    assert second == first
    assert len(engine.builds) == 1
    assert engine.builds[0]["network_mode"] == "host"
    assert engine.builds[0]["buildargs"] == {"BASE": MADE_HERE}
    assert ("build", 2, 2) in [(step.name, step.done, step.total) for step in steps]


@pytest.mark.usefixtures("cache")
def test_image_of_another_source_is_replaced(engine: Engine) -> None:
    engine.known["agentenv-sandbox:local"] = Image(9, {LABEL_CONTENT: "of another source"})
    assert ensure.image_status(engine).stale

    assert not ensure.ensure_image(client=engine).stale
    assert engine.removed == ["sha256:9"]


@pytest.mark.usefixtures("cache")
def test_image_of_a_registry_is_never_built_nor_called_stale(engine: Engine) -> None:
    name = "registry.example.com:5000/agentenv-sandbox:1"
    with pytest.raises(SandboxUnavailableError, match="docker pull registry"):
        ensure.ensure_image(name, client=engine)
    engine.known[name] = Image(3, {})

    found = ensure.ensure_image(name, client=engine)

    assert (found.present, found.stale, engine.builds) == (True, False, [])


@pytest.mark.usefixtures("cache")
def test_two_builders_at_once_make_one_image(engine: Engine) -> None:
    began, go_on = threading.Event(), threading.Event()
    plain = engine.build

    def slow(**asked: Any) -> Iterator[dict[str, str]]:
        began.set()
        assert go_on.wait(30)
        yield from plain(**asked)

    engine.build = slow  # type: ignore[method-assign]
    told: list[str] = []

    def second(step: BuildStep) -> None:
        told.append(step.name)
        go_on.set()

    threads = [threading.Thread(target=ensure.ensure_image, kwargs={"client": engine, "report": silent})]
    threads[0].start()
    assert began.wait(30)
    threads.append(threading.Thread(target=ensure.ensure_image, kwargs={"client": engine, "report": second}))
    threads[1].start()
    for thread in threads:
        thread.join(60)

    assert told == ["wait"]
    assert len(engine.builds) == 1


@pytest.mark.usefixtures("cache")
def test_engine_that_dies_when_it_is_asked_to_build_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**asked: Any) -> Iterator[dict[str, str]]:
        raise ConnectionError("connection aborted")

    monkeypatch.setattr(engine, "build", build)
    with pytest.raises(SandboxUnavailableError, match="building the image failed: connection aborted"):
        ensure.ensure_image(client=engine)


@pytest.mark.usefixtures("cache")
def test_failing_step_is_told_with_its_last_words(engine: Engine) -> None:
    engine.lines = [
        {"stream": "Step 3/9 : RUN apt-get update\n"},
        {"stream": "E: Could not resolve 'mirror.example'\n"},
        {"error": "The command returned a non-zero code: 100"},
    ]
    with pytest.raises(SandboxUnavailableError, match=r"code: 100.*Could not resolve"):
        ensure.ensure_image(client=engine)


# -- what it starts from -----------------------------------------------------------------------------


def test_base_that_is_there_is_taken(engine: Engine, tmp_path: Path) -> None:
    assert base_image(engine, tmp_path, silent) == MADE_HERE
    assert base_image(Engine(registry=True), tmp_path, silent) == FROM_REGISTRY


def test_without_a_registry_the_base_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []

    def run(argv: list[str]) -> None:
        made.append(argv)
        Path(argv[-1]).write_bytes(b"tar")

    monkeypatch.setattr(base, "_run", run)
    monkeypatch.setattr("agentenv.image.base.shutil.which", lambda name: f"/usr/bin/{name}")
    for _ in range(2):  # the second engine is another: a machine whose engine was emptied
        engine = Engine()
        assert base_image(engine, tmp_path, silent) == MADE_HERE
        assert len(engine.imported) == 1

    assert len(made) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".tar"]


def test_neither_registry_nor_mmdebstrap_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.image.base.shutil.which", lambda name: None)

    with pytest.raises(SandboxUnavailableError, match=r"no such host.*mmdebstrap is not installed.*apt-get install"):
        base_image(Engine(), tmp_path, silent)


def test_failed_mmdebstrap_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "mmdebstrap"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho half > $(eval echo \\${$#}); echo 'E: mirror is down' >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    cache = tmp_path / "cache"

    with pytest.raises(SandboxUnavailableError, match="mirror is down"):
        base_image(Engine(), cache, silent)

    assert list(cache.iterdir()) == []


def test_base_has_no_manuals_but_keeps_licences(tmp_path: Path) -> None:
    argv = mmdebstrap_argv(tmp_path / "x.tar")

    assert argv[-2:] == ["bookworm", str(tmp_path / "x.tar")]
    assert "--dpkgopt=path-exclude=/usr/share/man/*" in argv
    assert argv.index("--dpkgopt=path-include=/usr/share/doc/*/copyright") > argv.index(
        "--dpkgopt=path-exclude=/usr/share/doc/*"
    )
    assert not [word for word in argv if word.startswith("--include")]
    assert "--include=git,python3" in mmdebstrap_argv(tmp_path / "x.tar", ["git", "python3"])


def test_packages_are_fetched_for_the_image_not_for_this_interpreter(tmp_path: Path) -> None:
    argv = ensure.pip_argv("/py", tmp_path / "t", tmp_path / "pins", "aarch64")

    assert argv[argv.index("--python-version") + 1] == "3.11"
    assert "--only-binary=:all:" in argv
    assert argv[argv.index("--constraint") + 1] == str(tmp_path / "pins")
    assert {argv[at + 1].rpartition("_")[2] for at, word in enumerate(argv) if word == "--platform"} == {"aarch64"}
