"""Templates are kept, belong to runs, and their steps are a Dockerfile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentenv.builder.build import load
from agentenv.e2b.builds import dockerfile
from agentenv.e2b.replies import RefusalError
from agentenv.e2b.templates import TemplateBook, Version
from agentenv.errors import ConfigError

IMAGE = "sha256:" + "1" * 64


async def test_what_clients_built_outlives_the_service(tmp_path: Path) -> None:
    file = tmp_path / "new" / "templates.json"
    book = TemplateBook({"base": "debian:bookworm"}, file)
    await book.add("a", "mine", ["default", "v1"], Version(image=IMAGE, env={"A": "1"}))
    await book.add("a", "snap", ["default"], Version(image=IMAGE), snapshot_of="sandbox")
    again = TemplateBook({"base": "debian:trixie"}, file)
    assert again.version("a", "mine:v1")[1] == book.version("a", "mine")[1]
    assert again.version("a", "base")[1].image == "debian:trixie"
    assert [one.name for one in again.of("a")] == ["base", "mine"]
    assert [one.name for one in again.snapshots("a")] == ["snap"]


async def test_a_runs_templates_are_its_own(tmp_path: Path) -> None:
    book = TemplateBook({"base": "debian:bookworm"}, tmp_path / "templates.json")
    await book.add("a", "mine", ["default"], Version(image=IMAGE))
    for name in ("mine", "base:none", "missing"):
        with pytest.raises(RefusalError, match="not found"):
            book.version("b", name)
    with pytest.raises(RefusalError, match="of the farm's settings"):
        await book.remove("a", "base")
    with pytest.raises(RefusalError, match="tag: got ':v2'"):
        await book.add("a", "mine", [":v2"], Version(image=IMAGE))
    await book.untag("a", "mine", ["default"])
    with pytest.raises(RefusalError, match="not found"):
        book.version("a", "mine")
    await book.remove("a", "mine")
    assert TemplateBook({}, tmp_path / "templates.json").of("a") == []


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "templates.json").write_text("[{")
    with pytest.raises(ConfigError, match=r"templates\.json cannot be read"):
        TemplateBook({}, tmp_path / "templates.json")


def test_steps_become_a_dockerfile_that_the_builder_reads(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [
        {"type": "RUN", "args": ['echo "$HOME" > a']},
        {"type": "RUN", "args": ["id", "root"]},
        {"type": "COPY", "args": ["app/", "/srv", "", "755"], "filesHash": "h1"},
        {"type": "COPY", "args": ["b*.txt", "/srv/b", "root"], "filesHash": "h2"},
        {"type": "ENV", "args": ["A", 'x "y" z', "B", "2"]},
        {"type": "WORKDIR", "args": ["/srv"]},
        {"type": "USER", "args": ["root"]},
    ]
    made = dockerfile(Version(image=IMAGE), steps, {"h1": "0.tar", "h2": "1.tar"})
    assert made.text.splitlines() == [
        f"FROM {IMAGE} AS files0",
        "USER root",
        "ADD 0.tar /e2b-files/",
        f"FROM {IMAGE} AS files1",
        "USER root",
        "ADD 1.tar /e2b-files/",
        f"FROM {IMAGE}",
        "USER user",
        "WORKDIR /home/user",
        'RUN ["/bin/bash", "-l", "-c", "echo \\"$HOME\\" > a"]',
        "USER root",
        'RUN ["/bin/bash", "-l", "-c", "id"]',
        "USER user",
        'COPY --from=files0 --chown=user --chmod=755 ["/e2b-files/app/", "/srv"]',
        'COPY --from=files1 --chown=root ["/e2b-files/b*.txt", "/srv/b/"]',
        'ENV A="x \\"y\\" z"',
        'ENV B="2"',
        "WORKDIR /srv",
        "USER root",
    ]
    assert (made.user, made.workdir) == ("root", "/srv")
    assert made.lines == (10, 13, 14, 15, 17, 18, 19)
    (tmp_path / "Dockerfile").write_text(made.text)
    load(tmp_path, None)


@pytest.mark.parametrize("step", [{"type": "ADD", "args": ["a", "b"]}, {"type": "ENV", "args": ["A"]}, {}])
def test_a_step_that_is_not_known_is_refused(step: dict[str, Any]) -> None:
    with pytest.raises(RefusalError, match="is not known"):
        dockerfile(Version(image=IMAGE), [step], {})
