"""``agentenv images``: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import urlopen

import pytest

from agentenv.store import Store
from agentenv.store.reference import parse
from tests.cli import Command
from tests.image_sources import member, oci_layout, tar_of

LAYER = tar_of(member("a", b"a" * 100))


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command({"AGENTENV_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "200"})


@pytest.fixture
def reference(tmp_path: Path) -> str:
    return f"oci:{oci_layout(tmp_path / 'oci', LAYER).directory}"


def test_pulled_listed_and_removed(tmp_path: Path, command: Command, reference: str) -> None:
    (pulled,) = command.told("images", "pull", reference)["images"]
    assert pulled["reference"] == reference
    assert Store(tmp_path / "cache/store").find(pulled["digest"]) is not None
    listed = command.told("images", "list")
    assert listed["images"][0]["references"] == [reference]
    assert listed["images"][0]["pinned"] is False
    assert listed["size_bytes"] > len(LAYER)
    dry = command.told("images", "gc", "--budget", "0", "--keep", "0", "--dry-run")
    assert dry["images"] == [pulled["digest"]]
    assert command.told("images", "gc", "--budget", "0", "--keep", "0")["freed_bytes"] == listed["size_bytes"]
    assert command.told("images", "list")["images"] == []


def test_what_people_read(tmp_path: Path, command: Command, reference: str) -> None:
    store = str(tmp_path / "other")
    code, said, progress = command.run("images", "pull", reference, "--store", store)
    assert (code, said.split()[0]) == (0, reference)
    assert "✓ layers" in progress
    digest = said.split()[1]
    with Store(Path(store)).pin(digest):
        code, said, _ = command.run("images", "list", "--store", store)
        assert digest.removeprefix("sha256:")[:12] in said
        assert "in use" in said
        assert "1 images, 0.0 MB in" in said
        assert "0 images, 0.0 MB freed" in command.run("images", "gc", "--budget", "0", "--keep=0", "--store", store)[1]
    assert f"removed {digest}" in command.run("images", "gc", "--budget", "0", "--keep=0", "--store", store)[1]


def test_an_image_used_a_moment_ago_is_kept(command: Command, reference: str) -> None:
    command.told("images", "pull", reference)
    assert command.told("images", "gc", "--budget", "0")["images"] == []


def test_a_name_given_here_hides_no_registrys_image(tmp_path: Path, command: Command, reference: str) -> None:
    tagged = command.told("images", "tag", reference, "debian:trixie")
    assert tagged["name"] == "committed:debian:trixie"
    (listed,) = command.told("images", "list")["images"]
    assert (listed["digest"], sorted(listed["references"])) == (
        tagged["digest"],
        ["committed:debian:trixie", reference],
    )
    for name in ("localhost/debian:trixie", "committed:debian:trixie", tagged["digest"]):
        assert command.told("images", "pull", name)["images"][0]["digest"] == tagged["digest"]
    store = Store(tmp_path / "cache/store")
    assert store.named(parse("debian:trixie")) is None
    assert command.told("images", "tag", "localhost/debian:trixie", "localhost/base")["digest"] == tagged["digest"]
    assert command.told("images", "rm", "debian:trixie", "base")["names"] == [
        "committed:debian:trixie",
        "committed:base:latest",
    ]
    code, _, stderr = command.run("images", "rm", "base")
    assert (code, "no image in this store is named localhost/base:latest" in stderr) == (2, True)
    assert store.references() == {tagged["digest"]: [reference]}


def test_a_build_is_not_begun_for_what_cannot_be_a_name(tmp_path: Path, command: Command) -> None:
    code, _, stderr = command.run("images", "build", "-t", "Upper", str(tmp_path))
    assert (code, "'Upper' cannot be a part of a name" in stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["oci:/nonexistent"], 2, "/nonexistent does not exist"),
        (["Upper"], 2, "allowed: NAME"),
        (["x", "--mirror", "docker.io"], 2, "PREFIX=OTHER"),
    ],
)
def test_errors_tell_what_to_do(command: Command, arguments: list[str], code: int, said: str) -> None:
    found, _, stderr = command.run("images", "pull", *arguments)
    assert found == code
    assert said in stderr


def test_an_error_is_one_document(command: Command) -> None:
    assert command.told("images", "pull", "oci:/nonexistent")["fault"] == "task"


def test_a_keeper_serves_until_it_is_told_to_end(tmp_path: Path, command: Command) -> None:
    (tmp_path / "token").write_text("keepers-token-0123456789")
    arguments = ("images", "serve", "--token-file", str(tmp_path / "token"), "--port", "0", "--json")
    with command.started(*arguments, "--registry", "docker.io", "--budget", "1") as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["store"] == str(tmp_path / "cache/store")
        with urlopen(f"{ready['url']}/health", timeout=60) as answer:
            assert answer.status == 200


def test_a_keeper_needs_its_token(tmp_path: Path, command: Command) -> None:
    code, _, stderr = command.run("images", "serve", "--token-file", str(tmp_path / "none"))
    assert code != 0
    assert "cannot be read" in stderr


def test_prefetched_into_this_machines_store(command: Command, reference: str) -> None:
    told = command.told("images", "prefetch", reference, "oci:/nonexistent")["images"]
    assert told[0] == {**told[0], "reference": reference, "error": None}
    assert [one["digest"] for one in command.told("images", "list")["images"]] == [told[0]["digest"]]
    assert (told[1]["digest"], told[1]["error"]["code"]) == (None, "config")
    code, said, stderr = command.run("images", "prefetch", reference, "oci:/nonexistent")
    assert (code, said.split()[:2]) == (1, [reference, told[0]["digest"]])
    assert "/nonexistent does not exist" in stderr


def test_prefetched_by_a_keeper(tmp_path: Path, command: Command, reference: str) -> None:
    (tmp_path / "token").write_text("keepers-token-0123456789")
    serve = (
        "images",
        "serve",
        "--port",
        "0",
        "--json",
        "--allow-path",
        str(tmp_path),
        "--store",
        str(tmp_path / "far"),
    )
    with command.started(*serve, "--token-file", str(tmp_path / "token")) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        asked = ("images", "prefetch", "--keeper", url, "--token-file", str(tmp_path / "token"))
        good, bad = command.told(*asked, reference, f"oci:{tmp_path}/none")["images"]
        assert (good["place"], good["error"]) == (url, None)
        assert Store(tmp_path / "far").find(good["digest"]) is not None
        assert bad["error"]["message"].endswith("/none does not exist")
        code, said, _ = command.run(*asked, reference)
        assert (code, said.split()) == (0, [reference, good["digest"], url])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--farm", "http://127.0.0.1:9", "--keeper", "http://127.0.0.1:9"],
            "the farm service calls its keepers itself",
        ),
        (["--keeper", "http://127.0.0.1:9"], "give both"),
        (["--farm", "http://127.0.0.1:9", "--token", "x"], "the nodes of this farm fetch their images"),
    ],
)
def test_prefetch_refuses_what_makes_no_sense(command: Command, arguments: list[str], said: str) -> None:
    code, _, stderr = command.run("images", "prefetch", *arguments, "dockerfile:.")
    assert code == 2
    assert said in stderr
