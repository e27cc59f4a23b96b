"""Where the nomad program comes from: PATH, cache, a release whose checksum holds, Go."""

from __future__ import annotations

import hashlib
import io
import platform
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentenv.dev import program
from agentenv.dev.program import ReleaseError, checksum_of, download, nomad_program, version_of
from agentenv.errors import SandboxUnavailableError
from agentenv.image import BuildStep, silent

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
NAME = f"nomad_{program.VERSION}_linux_{MACHINE}.zip"
NOMAD = f"#!/bin/sh\necho 'Nomad v{program.VERSION}'\n"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def zipped(text: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("LICENSE.txt", "…")
        archive.writestr("nomad", text)
    return file.getvalue()


class Releases:
    """A release server on loopback: path → body."""

    def __init__(self) -> None:
        files: dict[str, bytes] = {}
        self.files = files

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = files.get(self.path.rpartition("/")[2])
                if body is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body) + (1 if self.path.endswith("cut.zip") else 0)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}/nomad"

    def publish(self, body: bytes, checksum: str | None = None) -> None:
        self.files[NAME] = body
        sums = f"{'0' * 64}  nomad_0.0.1_other.zip\n{checksum or hashlib.sha256(body).hexdigest()}  {NAME}\n"
        self.files[f"nomad_{program.VERSION}_SHA256SUMS"] = sums.encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def releases() -> Iterator[Releases]:
    server = Releases()
    yield server
    server.close()


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a PATH with neither nomad nor go."""
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AGENTENV_NOMAD_RELEASES", "http://127.0.0.1:9")
    return tmp_path


def test_installed_program_is_preferred(alone: Path) -> None:
    found = script(alone / "bin" / "nomad", NOMAD)

    assert nomad_program(silent) == found


@pytest.mark.parametrize("says", ["Nomad v1.4.0", "something else"])
def test_installed_program_that_is_too_old_or_none_is_passed_over(
    alone: Path, releases: Releases, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(alone / "bin" / "nomad", f"#!/bin/sh\necho '{says}'\n")
    releases.publish(zipped(NOMAD))
    monkeypatch.setenv("AGENTENV_NOMAD_RELEASES", releases.address)

    assert nomad_program(silent) == alone / "cache" / "nomad" / f"nomad-{program.VERSION}"


def test_release_is_fetched_once_and_kept(alone: Path, releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    releases.publish(zipped(NOMAD))
    monkeypatch.setenv("AGENTENV_NOMAD_RELEASES", releases.address)
    steps: list[BuildStep] = []

    found = nomad_program(steps.append)
    releases.files.clear()

    assert nomad_program(silent) == found
    assert version_of(found) == tuple(map(int, program.VERSION.split(".")))
    assert any(step.total and step.done == step.total for step in steps)
    assert sorted(path.name for path in found.parent.iterdir()) == ["lock", found.name]


@pytest.mark.parametrize(
    ("body", "checksum", "message"),
    [
        (zipped(NOMAD), "0" * 64, "has the checksum"),
        (b"not a zip", None, "is not a valid release"),
        (zipped(NOMAD), "short", "does not state a checksum"),
    ],
    ids=["wrong-checksum", "no-zip", "no-checksum"],
)
def test_release_that_is_not_what_it_says_is_refused(
    alone: Path, releases: Releases, body: bytes, checksum: str | None, message: str
) -> None:
    releases.publish(body, checksum)

    with pytest.raises(ReleaseError, match=message):
        download(alone / "nomad", releases.address, silent)
    assert not (alone / "nomad").exists()


def test_releases_out_of_reach_fail_fast(alone: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ReleaseError, match="cannot be fetched"):
        download(alone / "nomad", "http://127.0.0.1:9", silent)
    with pytest.raises(ReleaseError, match="cannot be fetched"):
        download(alone / "nomad", "https://releases.invalid", silent)
    assert time.monotonic() - began < 30


def test_without_release_it_is_built_with_go_in_a_copy_of_the_module(alone: Path) -> None:
    go = "#!/bin/sh\nwhile [ $# -gt 1 ]; do [ $1 = -o ] && out=$2; shift; done\n"
    go += "ls > $out.files; echo github.com/a >&2; echo 'go: downloading x' >&2\n"
    go += f"printf '%s' \"{NOMAD.replace(chr(10), chr(92) + 'n')}\" > /dev/null\ncp {alone}/made $out\n"
    script(alone / "bin" / "go", go)
    script(alone / "made", NOMAD)
    steps: list[BuildStep] = []

    found = nomad_program(steps.append)

    assert version_of(found) is not None
    assert any("building: 1 packages" in step.detail for step in steps)


def test_neither_release_nor_go_says_what_to_install(alone: Path) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"cannot be fetched.*no go to build it.*install nomad"):
        nomad_program(silent)


def test_failing_build_is_told_with_its_last_words(alone: Path) -> None:
    script(alone / "bin" / "go", "#!/bin/sh\necho 'go: no network' >&2\nexit 1\n")

    with pytest.raises(SandboxUnavailableError, match="building nomad failed: go: no network"):
        nomad_program(silent)
    assert [path.name for path in (alone / "cache" / "nomad").iterdir()] == ["lock"]


def test_checksum_is_that_of_the_very_file() -> None:
    digest = "a" * 64
    assert checksum_of("n.zip", f"{'b' * 64}  n.zip.sig\n{digest}  n.zip\n") == digest
    with pytest.raises(ReleaseError, match=r"n\.zip"):
        checksum_of("n.zip", f"{digest}  other-n.zip\n")
