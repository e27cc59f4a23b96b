"""The driver, over roots in which commands really run."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentenv.builder.build import Built, LayerCache, Listeners, StepEvent, build, load
from agentenv.builder.context import BuildContext
from agentenv.builder.instructions import Copy, Run
from agentenv.builder.parser import parse
from agentenv.builder.plan import Options
from agentenv.errors import BuildStepError, CheckpointError, ConfigError, DockerfileError, ImageUnavailableError
from agentenv.store import layers
from tests.growth import longest_turn_s
from tests.image_sources import member, tar_of
from tests.unit.builder.trees import Tree, TreeMachine, TreeMachines, mode_of


class Bench:
    """A context, machines and a cache; what one build after the other makes of them."""

    def __init__(self, directory: Path) -> None:
        self.context = directory / "context"
        self.context.mkdir()
        self.machines = TreeMachines(directory / "trees")
        self.cache = LayerCache(directory / "cache")
        self.events: list[StepEvent] = []
        self.output = bytearray()

    def write(self, name: str, text: str = "", mode: int = 0o644) -> Path:
        path = self.context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    async def build(self, text: str, *, timeout_s: float = 600.0, target: str = "", **arguments: str) -> Built:
        self.events.clear()
        self.output.clear()
        with BuildContext(self.context) as context:
            return await build(
                parse(text),
                context,
                self.machines,
                self.cache,
                Options(target, arguments),
                listeners=Listeners(self.events.append, self.output.extend),
                timeout_s=timeout_s,
            )

    async def tree(self, text: str) -> Tree:
        return self.machines.built((await self.build(text)).image)

    def told(self) -> list[tuple[int, str, str]]:
        return [(event.number, event.place.keyword, event.state) for event in self.events]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_whole_dockerfile(bench: Bench) -> None:
    bench.write("src/app.sh", "echo of the app\n", 0o755)
    bench.write("requirements.txt", "nothing\n")
    built = await bench.build(
        """\
FROM base
ARG GREETING=hello
ENV NAME=world
WORKDIR /app
COPY requirements.txt src/ ./
RUN echo "$GREETING $NAME from $PWD" > out && ./app.sh >> out && cat out
USER 1000
LABEL made.by=us
ENTRYPOINT ["/app/app.sh"]
"""
    )
    tree, config = bench.machines.built(built.image), bench.machines.config(built.image)
    assert (tree.path / "app/out").read_text() == "hello world from /app\nof the app\n"
    assert bytes(bench.output) == b"hello world from /app\nof the app\n"
    assert (config.workdir, config.user, config.entrypoint, config.cmd) == ("/app", "1000", ("/app/app.sh",), None)
    assert dict(config.env)["NAME"] == "world"
    assert "GREETING" not in dict(config.env)
    assert config.labels == (("made.by", "us"),)
    assert (built.ran, built.cached) == (3, 0)
    assert bench.told() == [
        (number, keyword, state)
        for number, keyword in enumerate(("WORKDIR", "COPY", "RUN"), 1)
        for state in ("started", "done")
    ]
    assert bench.machines.open_now == 0


async def test_a_second_build_runs_nothing(bench: Bench) -> None:
    text = "FROM base\nRUN echo 1 > /a\nRUN echo 2 > /b\n"
    first = await bench.build(text)
    opened = len(bench.machines.opened)
    second = await bench.build(text)
    assert (second.image, second.ran, second.cached) == (first.image, 0, 2)
    assert len(bench.machines.opened) == opened
    assert bench.told() == [(1, "RUN", "cached"), (2, "RUN", "cached")]


async def test_a_change_runs_again_what_follows_it_and_only_that(bench: Bench) -> None:
    text = "FROM base\nRUN echo 1 > /a\nCOPY f /f\nRUN cat /f > /b\n"
    bench.write("f", "old")
    await bench.build(text)
    path = bench.write("f", "old")
    os.utime(path, (1, 1))
    assert (await bench.build(text)).ran == 0  # a new time is no change
    bench.write("f", "new")
    built = await bench.build(text)
    assert (built.ran, built.cached) == (2, 1)
    assert (bench.machines.built(built.image).path / "b").read_text() == "new"
    assert (await bench.build(text.replace("/b", "/c"))).ran == 1


async def test_a_build_argument_is_part_of_the_key_of_commands_behind_its_arg(bench: Bench) -> None:
    text = "FROM base\nRUN echo 1 > /a\nARG V\nRUN echo $V > /v\n"
    await bench.build(text, V="1")
    built = await bench.build(text, V="2")
    assert (built.ran, built.cached) == (1, 1)
    assert (bench.machines.built(built.image).path / "v").read_text() == "2\n"


async def test_a_proxy_reaches_the_command_and_no_key(bench: Bench) -> None:
    text = "FROM base\nRUN echo $http_proxy $HTTP_PROXY > /p\n"
    built = await bench.build(text, HTTP_PROXY="http://p:1")
    assert (bench.machines.built(built.image).path / "p").read_text() == "http://p:1 http://p:1\n"
    assert (await bench.build(text)).cached == 1


async def test_a_checkpoint_that_is_gone_is_made_again(bench: Bench) -> None:
    text = "FROM base\nRUN echo 1 > /a\nRUN echo 2 > /b\n"
    first = await bench.build(text)
    bench.machines.kept.clear()
    del bench.machines.committed[first.image]
    assert (await bench.build(text)).ran == 2


async def test_a_failing_command_is_told_with_its_line_and_last_words(bench: Bench) -> None:
    text = "FROM base\n\nRUN echo 1 > /a\nRUN for i in $(seq 100); do echo line $i; done; \\\n    exit 7\nRUN true\n"
    with pytest.raises(BuildStepError, match=r"Dockerfile:4: RUN for .*exit code 7") as raised:
        await bench.build(text)
    error = raised.value
    assert (error.line, error.exit_code, error.fault) == (4, 7, "task")
    assert error.output.splitlines() == [f"line {number}" for number in range(81, 101)]
    assert bench.told()[-1] == (2, "RUN", "failed")
    assert bench.machines.open_now == 0
    assert (await bench.build(text.replace("exit 7", "exit 0"))).cached == 1


async def test_a_command_that_takes_too_long_is_ended(bench: Bench) -> None:
    with pytest.raises(BuildStepError, match=r"was killed after 0\.5 s") as raised:
        await bench.build("FROM base\nRUN echo waiting; sleep 600\n", timeout_s=0.5)
    assert raised.value.exit_code is None


async def test_only_the_stages_that_the_target_needs_are_built(bench: Bench) -> None:
    text = """\
FROM base AS tools
RUN mkdir /opt && echo tool > /opt/tool && ln -s tool /opt/link
FROM base AS unused
RUN false
FROM tools AS last
COPY --from=tools /opt/ /copied
COPY --from=0 /opt/t* /opt/link /etc/passwd /single/
"""
    tree = await bench.tree(text)
    assert (tree.path / "copied/tool").read_text() == "tool\n"
    assert (tree.path / "copied/link").readlink() == Path("tool")
    assert (tree.path / "single/tool").read_text() == "tool\n"
    assert not (tree.path / "single/link").is_symlink()  # a link that is named is followed
    assert (tree.path / "single/passwd").is_file()
    assert (await bench.build(text)).ran == 0
    assert (await bench.build(text, target="tools")).ran == 0


async def test_a_stage_whose_copies_are_cached_is_not_built(bench: Bench) -> None:
    text = "FROM base AS one\nRUN echo 1 > /a\nFROM base\nCOPY --from=one /a /a\nRUN cat /a\n"
    await bench.build(text)
    one = [name for name, tree in bench.machines.kept.items() if not (tree.path / "proc").exists()]
    assert one == []
    opened = len(bench.machines.opened)
    built = await bench.build(text.replace("RUN cat", "RUN cat -n"))
    assert (built.ran, len(bench.machines.opened)) == (1, opened + 1)


async def test_files_come_from_another_image_with_their_owners(bench: Bench, tmp_path: Path) -> None:
    other = Tree(tmp_path / "other", {"/data": (0, 0), "/data/f": (7, 8)})
    (other.path / "data").mkdir(parents=True)
    (other.path / "data/f").write_text("theirs")
    bench.machines.add_image("other", other, bench.machines.config("sha256:base"))
    tree = await bench.tree("FROM base\nCOPY --from=other /data /srv/\nCOPY --from=other --chown=1:2 /data/f /g\n")
    assert (tree.path / "srv/f").read_text() == "theirs"
    assert (tree.owners["/srv/f"], tree.owners["/g"]) == ((7, 8), (1, 2))


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        ("COPY a /new", ["new"]),
        ("COPY a /new/", ["new/a"]),
        ("COPY a /srv", ["srv/a"]),
        ("COPY a b /new/", ["new/a", "new/b"]),
        ("COPY a b /srv", ["srv/a", "srv/b"]),
        ("COPY d /new", ["new/x", "new/y/z"]),
        ("COPY d a /new", ["new/a", "new/x", "new/y/z"]),
        ("COPY d/* /new/", ["new/x", "new/z"]),
        ("COPY ? /new/", ["new/a", "new/b", "new/x", "new/y/z"]),
        ("COPY [ab] nothing* /new/", ["new/a", "new/b"]),
        ("COPY nothing* /new/", []),
        ('COPY ["a", "with space", "/new/"]', ["new/a", "new/with space"]),
        ("WORKDIR /srv\nCOPY a .", ["srv/a"]),
        ("WORKDIR /srv\nCOPY a b", ["srv/b"]),
        ("WORKDIR /srv\nCOPY a ../new/", ["new/a"]),
        ("COPY link /new", ["new"]),
        ("COPY dirlink /new", ["new/x", "new/y/z"]),
        ("COPY a /into", ["srv/a"]),
        ("COPY <<one <<two /new/\n1\none\n2\ntwo", ["new/one", "new/two"]),
        ("COPY <<EOF /new\ntext\nEOF", ["new"]),
    ],
)
async def test_where_files_go(bench: Bench, copy: str, expected: list[str]) -> None:
    for name in ("a", "b", "d/x", "d/y/z", "with space"):
        bench.write(name, name)
    (bench.context / "link").symlink_to("d/x")
    (bench.context / "dirlink").symlink_to("d")
    before = await bench.tree("FROM base\nRUN ln -s srv /into\n")
    tree = await bench.tree(f"FROM base\nRUN ln -s srv /into\n{copy}\n")

    def files(root: Path) -> set[str]:
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and not path.is_symlink()}

    assert sorted(files(tree.path) - files(before.path)) == expected


async def test_a_file_is_copied_through_a_link_that_stands_at_its_destination(bench: Bench) -> None:
    bench.write("a", "new")
    tree = await bench.tree("FROM base\nRUN echo old > /srv/real && ln -s srv/real /at\nCOPY a /at\n")
    assert ((tree.path / "srv/real").read_text(), (tree.path / "at").is_symlink()) == ("new", True)


async def test_owners_modes_times_and_links_of_what_is_copied(bench: Bench) -> None:
    os.utime(bench.write("d/x", "1", 0o640), ns=(0, 1_600_000_000_000_000_000))
    (bench.context / "d/hard").hardlink_to(bench.context / "d/x")
    (bench.context / "d/soft").symlink_to("/nowhere/outside")
    bench.write("d/sub/run", "1", 0o700)
    tree = await bench.tree(
        "FROM base\nCOPY d /plain\nCOPY --chown=app d /named\nCOPY --chown=5:staff --chmod=0751 d /set/in/\n"
        "COPY --chmod=u=rwX,go= d /symbols\n"
    )
    assert (tree.path / "plain/x").stat().st_mtime == 1_600_000_000
    assert (tree.path / "plain/x").samefile(tree.path / "plain/hard")
    assert (tree.path / "plain/soft").readlink() == Path("/nowhere/outside")
    assert [mode_of(tree.path / "plain" / name) for name in ("x", "sub", "sub/run")] == [0o640, 0o755, 0o700]
    owners = [tree.owners[path] for path in ("/plain/x", "/named/sub/run", "/named", "/set", "/set/in/x")]
    assert owners == [(0, 0), (1001, 1002), (1001, 1002), (5, 50), (5, 50)]
    assert [mode_of(tree.path / "set" / name) for name in ("", "in", "in/x", "in/sub")] == [0o751] * 4
    assert [mode_of(tree.path / "symbols" / name) for name in ("x", "sub", "sub/run")] == [0o600, 0o700, 0o700]


async def test_add_unpacks_archives_and_copy_does_not(bench: Bench) -> None:
    with tarfile.open(bench.context / "a.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("in/f")
        member.size, member.uid, member.gid, member.mode = 3, 33, 34, 0o604
        archive.addfile(member, io.BytesIO(b"abc"))
    bench.write("plain.tar.gz", "no archive")
    tree = await bench.tree("FROM base\nADD *.tar.gz /out/\nCOPY a.tar.gz /copied\nADD --chown=9 a.tar.gz /nine\n")
    assert (tree.path / "out/in/f").read_bytes() == b"abc"
    assert (mode_of(tree.path / "out/in/f"), tree.owners["/out/in/f"]) == (0o604, (33, 34))
    assert (tree.path / "out/plain.tar.gz").read_text() == "no archive"
    assert tarfile.is_tarfile(tree.path / "copied")
    assert tree.owners["/nine/in/f"] == (9, 9)


async def test_a_workdir_is_the_user_s(bench: Bench) -> None:
    tree = await bench.tree("FROM base\nUSER app\nWORKDIR /home/app/work\nUSER root\nWORKDIR x\n")
    assert tree.owners["/home/app/work"] == (1001, 1002)
    assert tree.owners["/home/app/work/x"] == (0, 0)


async def test_heredocs_run(bench: Bench) -> None:
    tree = await bench.tree(
        """\
FROM base
ARG A=1
RUN <<EOF
set -e
echo "$A two" > /shell
cat <<INNER >> /shell
inner
INNER
EOF
RUN <<"PY"
#!/usr/bin/env -S python3 -I
import sys
open("/python", "w").write("it's $A\\n")
PY
RUN cat <<ONE > /one && cat <<-TWO > /two
of $A
ONE
	tab
	TWO
COPY <<EOF <<"RAW" /files/
A is $A, "quoted"
EOF
A is $A
RAW
"""
    )
    names = ("shell", "python", "one", "two", "files/EOF", "files/RAW")
    assert [(tree.path / name).read_text() for name in names] == [
        "1 two\ninner\n",
        "it's $A\n",
        "of 1\n",
        "tab\n",
        'A is 1, "quoted"\n',
        "A is $A\n",
    ]


async def test_scratch_and_a_chosen_shell(bench: Bench) -> None:
    bench.write("f", "1")
    built = await bench.build(
        'FROM base AS b\nSHELL ["/bin/bash", "-eo", "pipefail", "-c"]\nRUN echo $0 > /x\nFROM scratch\nCOPY f /\n'
        "COPY --from=b /x /\nCMD run\n"
    )
    tree = bench.machines.built(built.image)
    assert sorted(path.name for path in tree.path.iterdir()) == ["f", "x"]
    assert (tree.path / "x").read_text() == "/bin/bash\n"
    config = bench.machines.config(built.image)
    assert (config.cmd, config.workdir) == (("/bin/sh", "-c", "run"), "/")


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        ("COPY missing /", r"Dockerfile:2: COPY: missing is not in the build context"),
        ("COPY ../outside /", "leads out of the build context"),
        ("COPY escape /", "leads out of the build context: escape is a link to /etc"),
        ("COPY up/f /", "leads out of the build context: it leads out by .."),
        ("COPY ignored /", "excluded by .dockerignore"),
        ("COPY a b /new", "b would overwrite the file before it"),
        ("COPY --chown=nobody a /new", "nobody: the image has no user or group nobody"),
        ("COPY --chmod=rwx a /new", "rwx is not a mode"),
        ("COPY a /etc/passwd/", "cannot write to /etc/passwd"),
        ("COPY --from=other a /new", "there is no other"),
        ("COPY --from=base /missing /new", "/missing does not exist there"),
        ("COPY [a /", "bracket"),
        ("ADD bad.tar /", "leads out of the directory"),
        ("ADD device.tar /", "is a device"),
        ("ADD white.tar /", r"/d/\.wh\.f has a name that means a deletion"),
        ("COPY .wh.a /", r"/\.wh\.a has a name that means a deletion"),
        ("COPY a /new/.wh.a", r"/new/\.wh\.a has a name that means a deletion"),
        ("COPY a /.wh.d/", r"/\.wh\.d/a has a name that means a deletion"),
        ("COPY e /new/", r"/new/f/\.wh\.\.wh\.\.opq has a name that means a deletion"),
        ("COPY --from=base /etc/.wh.a /new", "/etc/.wh.a does not exist there"),
        ("ADD late.tar /", "reading what it copies failed: a header at byte 1024 is damaged"),
        ("ADD cut.tar /", "reading what it copies failed: a header at byte 1024 is damaged"),
        ("ADD when.tar /", "reading what it copies failed: a time of 'noon'"),
        ("ADD gap.tar /", "reading what it copies failed: more follows after a lone block of zeros at byte 1024"),
    ],
)
async def test_what_cannot_be_copied_is_refused_by_name(bench: Bench, copy: str, message: str) -> None:
    for name in ("a", "b", "ignored", ".wh.a", "e/f/.wh..wh..opq", "e/.whether"):
        bench.write(name)
    for name, damaged in _damaged_tars().items():
        (bench.context / name).write_bytes(damaged)
    (bench.context / "escape").symlink_to("/etc")
    (bench.context / "up").symlink_to("../..")
    bench.write(".dockerignore", "ignored")
    changes: dict[str, Callable[[tarfile.TarInfo], None]] = {
        "bad": lambda member: setattr(member, "name", "../f"),
        "device": lambda member: setattr(member, "type", tarfile.CHRTYPE),
        "white": lambda member: setattr(member, "name", "d/.wh.f"),
    }
    for name, change in changes.items():
        with tarfile.open(bench.context / f"{name}.tar", "w") as archive:
            member = tarfile.TarInfo("f")
            change(member)
            archive.addfile(member)
    with pytest.raises(ConfigError, match=message) as raised:
        await bench.build(f"FROM base\n{copy}\n")
    assert raised.value.next_step
    assert bench.machines.committed.keys() == {"sha256:base"}


def _damaged_tars() -> dict[str, bytes]:
    """Of two files of one byte, whose second header is at byte 1024."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in ("one", "two"):
            entry = tarfile.TarInfo(name)
            entry.size = 1
            archive.addfile(entry, io.BytesIO(b"x"))
    whole = out.getvalue()
    wrong_sum = bytes([whole[1024] ^ 1])
    return {
        "when.tar": tar_of(member("f", pax_headers={"mtime": "noon"})),
        "late.tar": whole[:1024] + wrong_sum + whole[1025:],
        "cut.tar": whole[:1200],
        "gap.tar": whole[:1024] + bytes(512) + whole[1024:],
    }


async def test_a_checkpoint_that_is_refused_names_the_line(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(machine: TreeMachine) -> str:
        raise CheckpointError("/.wh.a cannot be in an image", next_step="rename it")

    monkeypatch.setattr(TreeMachine, "checkpoint", refused)
    with pytest.raises(CheckpointError, match=r"Dockerfile:3: RUN: /\.wh\.a cannot .* \(rename it\)"):
        await bench.build("FROM base\nUSER 0\nRUN touch /.wh.a\n")
    assert bench.told()[-1] == (1, "RUN", "failed")


@pytest.mark.parametrize(
    ("change", "message"),
    [(Path.unlink, "No such file"), (lambda path: path.write_text("other"), "it has changed since the build began")],
)
async def test_a_file_that_changes_before_it_is_copied_is_no_image(
    bench: Bench, change: Callable[[Path], object], message: str
) -> None:
    path = bench.write("f", "text")

    def on_step(event: StepEvent) -> None:
        if event.state == "started":
            change(path)

    with BuildContext(bench.context) as context, pytest.raises(DockerfileError, match=f"COPY: reading.*{message}"):
        await build(
            parse("FROM base\nCOPY f /\n"), context, bench.machines, bench.cache, listeners=Listeners(on_step=on_step)
        )
    assert bench.machines.committed.keys() == {"sha256:base"}


async def test_half_an_archive_is_no_image(bench: Bench) -> None:
    with tarfile.open(bench.context / "a.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("f")
        member.size = 1_000_000
        archive.addfile(member, io.BytesIO(os.urandom(member.size)))
    whole = (bench.context / "a.tar.gz").read_bytes()
    (bench.context / "a.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DockerfileError, match="Dockerfile:2: ADD: reading what it copies failed"):
        await bench.build("FROM base\nADD a.tar.gz /\n")
    (bench.context / "a.tar.gz").write_bytes(whole[:4] + b"garbage" * 100)
    assert (await bench.tree("FROM base\nADD a.tar.gz /\n")).path.joinpath("a.tar.gz").is_file()
    (bench.context / "a.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(DockerfileError, match="compressed with Zstandard"):
        await bench.build("FROM base\nADD a.tar.zst /\n")


def test_only_a_newline_ends_a_line_and_heredocs_keep_their_bytes(tmp_path: Path) -> None:
    """As BuildKit's parser, which splits at newlines and takes carriage returns away at the ends of instructions."""
    path = tmp_path / "Dockerfile"
    text = "FROM a\r\nRUN one \\\r\n  two\r\nRUN a\rb\nCOPY <<EOF /f\r\n1\r\n2\r3\n\rEOF\r\n\x85\u2028\r\nEOF\r\n"
    path.write_bytes(text.encode())
    one, two, copy = load(tmp_path).stages[0].instructions
    assert isinstance(one, Run)
    assert isinstance(two, Run)
    assert isinstance(copy, Copy)
    assert (one.command.words, two.command.words) == (("one   two",), ("a\rb",))
    assert [file.content for file in copy.inline] == ["1\r\n2\r3\n\rEOF\r\n\x85\u2028\r\n"]


def test_a_dockerfile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM a\r\nRUN é\r\n")
    assert load(tmp_path).stages[0].instructions[0].place.file == "Dockerfile"
    assert load(tmp_path / "context", path).stages[0].instructions[0].place.file == str(path)
    path.write_bytes(b"FROM a\nRUN \xff\n")
    with pytest.raises(DockerfileError, match="not UTF-8"):
        load(tmp_path)
    with pytest.raises(DockerfileError, match=r"missing: Dockerfile: No such file"):
        load(tmp_path, tmp_path / "missing")


HOSTILE = {
    "wildcards": ("FROM base\nCOPY *a*a*a*a*a*a*a*a*b /c/\n", ""),
    "rules": ("FROM base\nCOPY . /c\n", "**/x/" * 14 + "y"),
    "many rules": ("FROM base\nCOPY . /c\n", "**/*x*x*y\n" * 6_000),
    "a prefix": ("FROM base\nENV A=" + "a" * 4000 + "\nENV B=${A##*a*a*a*a*a*a*a*a*b}\nCOPY . /c\n", ""),
    "a long line": ("FROM base\nENV A=" + "a" * 150_000 + "\nCOPY . /c\n", ""),
    "many lines": ("FROM base\n" + "ENV A=$B\n" * 15_000 + "COPY . /c\n", ""),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_context_holds_no_loop(name: str, bench: Bench) -> None:
    text, rules = HOSTILE[name]
    bench.write("a" * 250)
    bench.write("/".join(["x"] * 60))
    bench.write(".dockerignore", rules)
    bench.write("Dockerfile", text)

    async def looked_at() -> None:
        dockerfile = await asyncio.to_thread(load, bench.context)
        with ExitStack() as stack:
            context = await asyncio.to_thread(stack.enter_context, BuildContext(bench.context))
            with suppress(DockerfileError):
                await build(dockerfile, context, bench.machines, bench.cache)

    assert await longest_turn_s(looked_at()) < 5.0


async def test_an_archive_that_swells_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_SWELLS_FROM_BYTES", 1_000_000)
    with tarfile.open(bench.context / "a.tar.gz", "w:gz") as archive:
        for name in "ab":
            made, content = member(name, bytes(900_000))
            archive.addfile(made, io.BytesIO(content))
    with pytest.raises(DockerfileError, match=r"Dockerfile:2: ADD: it unpacks to \d+ bytes, more than 100 times"):
        await bench.build("FROM base\nADD a.tar.gz /\n")


async def test_a_file_of_holes_is_not_copied(bench: Bench) -> None:
    bench.write("holes")
    os.truncate(bench.context / "holes", 2**40)
    with pytest.raises(DockerfileError, match=r"Dockerfile:2: COPY: holes cannot be read: almost all .* are holes"):
        await bench.build("FROM base\nCOPY holes /\n")


async def test_a_full_disk_is_no_fault_of_a_dockerfile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write("a", "x" * 100)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=1, f_blocks=2**40, f_bavail=2**30 + 99))
    with pytest.raises(ImageUnavailableError, match=r"Dockerfile:2: COPY: No space left .*: 100 more bytes"):
        await bench.build("FROM base\nCOPY a /\n")
