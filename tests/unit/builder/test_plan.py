"""From instructions to steps: variables, stages, configuration and keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv.builder.machine import DEFAULT_PATH, ImageConfig
from agentenv.builder.parser import parse
from agentenv.builder.plan import Options, Plan, StagePlan, base_images, copied_images, plan
from agentenv.builder.steps import CopyStep, RunStep, WorkdirStep, key_of
from agentenv.errors import DockerfileError

BASE = ImageConfig(env=(("PATH", "/base/bin"), ("FROM_BASE", "1")), cmd=("base",), user="someone", workdir="/work")


def planned(text: str, target: str = "", arguments: dict[str, str] | None = None, base: ImageConfig = BASE) -> Plan:
    dockerfile, options = parse(text), Options(target, arguments or {})
    return plan(dockerfile, options, dict.fromkeys(base_images(dockerfile, options), base))


def last(text: str, **arguments: str) -> StagePlan:
    found = planned(text, arguments=arguments)
    return found.stages[found.target]


def variables(text: str, **arguments: str) -> dict[str, str]:
    """What the last RUN sees, without the base's."""
    step = last(text, **arguments).steps[-1]
    assert isinstance(step, RunStep)
    return {name: value for name, value in step.env if name not in ("PATH", "FROM_BASE")}


def test_commands_are_left_to_the_shell() -> None:
    stage = last("FROM a\nENV x=1\nRUN echo $x ${y:-z}\nCMD run $x\nENTRYPOINT exec $x\n")
    (run,) = stage.steps
    assert isinstance(run, RunStep)
    assert run.argv == ("/bin/sh", "-c", "echo $x ${y:-z}")
    assert (run.user, run.cwd) == ("someone", "/work")
    assert stage.config.cmd == ("/bin/sh", "-c", "run $x")
    assert stage.config.entrypoint == ("/bin/sh", "-c", "exec $x")


def test_an_entrypoint_forgets_the_base_s_cmd_and_only_that() -> None:
    assert last('FROM a\nENTRYPOINT ["x"]\n').config.cmd is None
    assert last('FROM a\nCMD ["mine"]\nENTRYPOINT ["x"]\n').config.cmd == ("mine",)
    assert last("FROM a\nCMD []\n").config.cmd == ()


def test_a_chosen_shell_counts_from_there_on() -> None:
    stage = last('FROM a\nRUN a\nSHELL ["/bin/bash", "-lc"]\nRUN b\nRUN ["c", "$x"]\nCMD d\n')
    assert [step.argv for step in stage.steps if isinstance(step, RunStep)] == [
        ("/bin/sh", "-c", "a"),
        ("/bin/bash", "-lc", "b"),
        ("c", "$x"),
    ]
    assert (stage.config.cmd, stage.config.shell) == (("/bin/bash", "-lc", "d"), ("/bin/bash", "-lc"))


def test_all_words_of_one_env_see_the_variables_before_it() -> None:
    assert variables("FROM a\nENV x=1\nENV x=2 y=$x\nRUN a") == {"x": "2", "y": "1"}
    assert last("FROM a\nENV PATH=/mine:$PATH\n").config.env[0] == ("PATH", "/mine:/base/bin")


def test_an_arg_is_for_the_build_and_an_env_for_the_image() -> None:
    stage = last("FROM a\nARG x=1\nENV y=$x\nRUN a\n")
    assert dict(stage.config.env).keys() == {"PATH", "FROM_BASE", "y"}
    assert variables("FROM a\nARG x=1\nENV y=$x\nRUN a\n") == {"x": "1", "y": "1"}


def test_where_arg_takes_its_value_from() -> None:
    text = "ARG before=global\nFROM a\nARG before\nARG unset\nARG empty=\nARG late=$before-x\nRUN a\n"
    assert variables(text) == {"before": "global", "empty": "", "late": "global-x"}
    assert variables(text, before="given", unset="too") == {
        **{"before": "given", "unset": "too", "empty": "", "late": "given-x"}
    }
    assert variables("ARG g=1\nFROM a\nRUN a\n") == {}, "an ARG before FROM counts in no stage that does not name it"
    assert variables("ARG g=1\nFROM a\nARG g=2\nRUN a\n") == {"g": "2"}


def test_arguments_end_with_their_stage_unless_a_stage_is_built_on_it() -> None:
    text = "FROM a AS one\nARG x=1\nFROM {} AS two\nRUN echo\n"
    assert variables(text.format("a")) == {}
    assert variables(text.format("one")) == {"x": "1"}


def test_of_arg_and_env_the_later_wins() -> None:
    assert variables("FROM a\nENV x=env\nARG x=arg\nRUN a\n") == {"x": "arg"}
    assert variables("FROM a\nARG x=arg\nENV x=env\nRUN a\n", x="given") == {"x": "env"}


def test_a_stage_built_on_another_sees_its_env_in_front_of_its_arg() -> None:
    assert variables("FROM a AS one\nENV x=env\nARG x=arg\nARG y=1\nFROM one\nRUN a\n") == {"x": "env", "y": "1"}


@pytest.mark.parametrize("signal", ["SIGTERM", "TERM", "15", "SIGRTMIN+3", "rtmax-1"])
def test_signals(signal: str) -> None:
    assert last(f"FROM a\nSTOPSIGNAL {signal}\n").config.stop_signal == signal


def test_the_platform_is_known_where_it_is_asked_for() -> None:
    assert variables("FROM a\nARG TARGETARCH\nARG TARGETPLATFORM\nRUN a\n") == {
        **{"TARGETARCH": "amd64", "TARGETPLATFORM": "linux/amd64"}
    }
    assert variables("FROM a\nRUN a\n") == {}
    stages = "FROM a AS Tools\nFROM a\nARG TARGETSTAGE\nRUN a\n"
    assert variables(stages) == {"TARGETSTAGE": "default"}
    (run,) = planned(stages.replace("FROM a\n", "FROM a AS last\n"), "Last").stages[1].steps
    assert isinstance(run, RunStep)
    assert dict(run.env)["TARGETSTAGE"] == "Last"
    assert base_images(parse("FROM a:$TARGETARCH"), Options(platform="linux/arm64")) == ("a:arm64",)


@pytest.mark.parametrize("platform", ["linux/amd64", "linux/x86_64", "$TARGETPLATFORM", "$BUILDPLATFORM", "amd64"])
def test_a_platform_that_is_this_one_is_fine(platform: str) -> None:
    assert planned(f"FROM --platform={platform} a\n").stages[0].base == "a"


def test_another_platform_is_refused() -> None:
    with pytest.raises(DockerfileError, match=r"--platform=linux/arm64 is not this machine's linux/amd64"):
        planned("FROM --platform=linux/arm64 a\n")


def test_proxies_reach_commands_in_both_spellings_and_not_the_key() -> None:
    with_proxy = last("FROM a\nRUN a\n", https_proxy="p").steps[0]
    without = last("FROM a\nRUN a\n").steps[0]
    assert isinstance(with_proxy, RunStep)
    assert with_proxy.hidden == (("https_proxy", "p"), ("HTTPS_PROXY", "p"))
    assert key_of("", with_proxy) == key_of("", without)


def test_words_that_are_substituted() -> None:
    stage = last(
        "FROM a\nARG v=x\nUSER $v\nWORKDIR /$v\nLABEL $v=$v\nEXPOSE 80$empty 90-91/udp\nSTOPSIGNAL SIG${v:+TERM}\n"
        "COPY --chown=$v --chmod=7${v:+00} a$v $v/\n"
    )
    config = stage.config
    assert (config.user, config.workdir, config.labels) == ("x", "/x", (("x", "x"),))
    assert (config.ports, config.stop_signal) == (("80/tcp", "90/udp", "91/udp"), "SIGTERM")
    workdir, copy = stage.steps
    assert isinstance(workdir, WorkdirStep)
    assert isinstance(copy, CopyStep)
    assert (workdir.path, workdir.user) == ("/x", "x")
    assert (copy.sources, copy.destination, copy.chown, copy.chmod) == (("ax",), "/x/x/", "x", "700")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("/a", "/a"),
        ("/a/", "/a/"),
        ("/a/.", "/a/"),
        ("a", "/work/a"),
        (".", "/work/"),
        ("./", "/work/"),
        ("..", "/"),
        ("../../..", "/"),
        ("/", "/"),
        ("//a//b", "/a/b"),
        ('""', "/work/"),
    ],
)
def test_destinations(written: str, expected: str) -> None:
    (step,) = last(f"FROM a\nCOPY x {written}\n").steps
    assert isinstance(step, CopyStep)
    assert step.destination == expected


def test_workdirs_follow_one_another() -> None:
    stage = last("FROM a\nWORKDIR x\nWORKDIR ../y/\nWORKDIR /z\nWORKDIR /\n")
    assert [step.path for step in stage.steps if isinstance(step, WorkdirStep)] == ["/work/x", "/work/y", "/z"]
    assert stage.config.workdir == "/"


def test_only_the_stages_that_the_target_needs() -> None:
    text = (
        "FROM one AS a\nRUN 1\nFROM two AS b\nFROM a AS c\nCOPY --from=b /x /x\nCOPY --from=image:1 /y /y\n"
        "FROM three AS d\nRUN --mount=type=cache,target=/c x\n"
    )
    found = planned(text, target="C")
    assert (sorted(found.stages), found.target, found.stages[2].base) == ([0, 1, 2], 2, 0)
    assert base_images(parse(text), Options("c")) == ("one", "two")
    assert copied_images(found) == ("image:1",)
    assert sorted(planned(text, target="1").stages) == [1]
    with pytest.raises(DockerfileError, match=r"Dockerfile:8: RUN: --mount"):
        planned(text)


def test_stages_are_found_by_name_in_front_of_images() -> None:
    found = planned("FROM a AS debian\nFROM debian\nFROM docker.io/debian\n")
    assert found.stages[2].base == "docker.io/debian"
    assert sorted(found.stages) == [2]
    with pytest.raises(DockerfileError, match=r"Dockerfile:2: FROM: .*'Debian'"):  # stages' names are in lower case
        planned("FROM a AS debian\nFROM Debian\n")
    assert planned("FROM a AS x\nFROM b AS x\nFROM x\n").stages.keys() == {1, 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM a\nCOPY --from=later x /\nFROM b AS later\nCOPY --from=0 x /\n", "stage later is not before"),
        ("FROM a AS self\nCOPY --from=self x /\n", "stage self is not before"),
        ("FROM a\nCOPY --from=7 x /\n", "stage 7 is not before"),
        ("FROM a\nARG s\nCOPY --from=$s x /\n", "--from takes no variables"),
        ("FROM $unset\n", "is empty"),
        ("FROM ${x\n", r"\${x"),
        ("FROM a\nENV x=${y\n", "Dockerfile:2: ENV"),
        ("FROM a\nWORKDIR ${y:?needs y}\n", "y: needs y"),
        ("FROM a\nEXPOSE 80/http\n", "80/http is not a port"),
        ("FROM a\nEXPOSE 90-80\n", "90-80 is not a port"),
        ("FROM a\nSTOPSIGNAL -9\n", "-9 is not a signal"),
        ("FROM a\nSTOPSIGNAL SIGX\n", "SIGX is not a signal"),
        ("FROM a\nARG u=https://x/y\nADD $u /\n", "https://x/y is a URL"),
        ("FROM a\nONBUILD RUN x\n", "ONBUILD"),
        ("FROM docker-archive:/etc/shadow\n", "Dockerfile:1: FROM: .* is an image of this machine"),
        ("FROM oci:/any/dir:tag\n", "Dockerfile:1: FROM: .* is an image of this machine"),
        ("FROM oci:base\n", "Dockerfile:1: FROM: .* is an image of this machine"),
        ("FROM dockerfile:/x\n", "Dockerfile:1: FROM: .* is an image of this machine"),
        ("ARG B=docker-daemon:x\nFROM $B\n", "Dockerfile:2: FROM: .* is an image of this machine"),
        ("FROM a\nCOPY --from=oci:/any/dir x /\n", "Dockerfile:2: COPY: .* is an image of this machine"),
        (f"FROM a\nENV x={'x' * 4000}\n" + "ENV x=$x$x\n" * 60, "Dockerfile:7: ENV: .* more than 65536 characters"),
        (f"FROM a\nARG x={'x' * 4000}\nENV y=${{x//x/{'y' * 17}}}\n", "replacements have more than 65536 characters"),
    ],
)
def test_what_cannot_be_planned(text: str, message: str) -> None:
    with pytest.raises(DockerfileError, match=message) as raised:
        planned(text)
    assert raised.value.next_step


def test_an_unknown_target_names_those_there_are() -> None:
    with pytest.raises(DockerfileError, match=r"there is no stage x.*the stages: one, two"):
        planned("FROM a AS one\nFROM b AS two\n", target="x")


def test_an_image_that_runs_instructions_in_later_builds_is_refused() -> None:
    with pytest.raises(DockerfileError, match=r"a has ONBUILD instructions \(RUN x"):
        planned("FROM a\n", base=replace(BASE, on_build=("RUN x",)))


def test_notes() -> None:
    text = "FROM a\nVOLUME /data\nHEALTHCHECK NONE\nMAINTAINER x\n"
    notes = planned(text, arguments={"unknown": "1", "HTTP_PROXY": "p"}).notes
    assert [note.split(":")[0].split(" is ")[0] for note in notes] == [
        "line 2",
        "line 3",
        "line 4",
        "no ARG declares the build argument unknown",
    ]


def test_scratch_has_a_path_and_nothing_else() -> None:
    stage = last("FROM scratch\nCOPY a /\n")
    assert (stage.base, stage.config.env, stage.config.workdir) == (None, (("PATH", DEFAULT_PATH),), "/")


def keys(text: str, **arguments: str) -> list[str]:
    found: list[str] = []
    for step in last(text, **arguments).steps:
        found.append(key_of(found[-1] if found else "base", step, "content" if isinstance(step, CopyStep) else ""))
    return found


def test_keys_change_with_what_a_step_depends_on_and_with_nothing_else() -> None:
    text = "FROM a\nARG v=1\nRUN one\nCOPY x /y\nRUN two\n"
    before = keys(text)
    assert before == keys("# comment\nFROM a\nARG v=1\n\nRUN one\nLABEL a=b\nCOPY x /y\nRUN two\n")
    assert [a == b for a, b in zip(before, keys(text.replace("two", "three")), strict=True)] == [True, True, False]
    assert [a == b for a, b in zip(before, keys(text.replace("/y", "/z")), strict=True)] == [True, False, False]
    assert [a == b for a, b in zip(before, keys(text, v="2"), strict=True)] == [False, False, False]
    for change in ("USER x", "WORKDIR /", 'SHELL ["/bin/bash", "-c"]', "ENV e=1"):
        assert keys(text.replace("RUN two", f"{change}\nRUN two"))[-1] != before[-1], change
    step = last(text).steps[1]
    assert key_of("p", step, "1") != key_of("p", step, "2") != key_of("q", step, "2")
