"""The recipes of docs/recipes.md, run as they stand there, on real slots."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agentenv.env.environment import AgentEnvConfig
from agentenv.tasks.pinned import fetch_runner
from agentenv.testing import Call, Reply, ScriptedPolicy, Turn, build_tokenizer
from tests.integration.test_env_prepared import LOCAL
from tests.small_image import small_image
from tests.unit.env.env_stubs import environment
from tests.unit.tasks.swe_repos import git

PAGE = (Path(__file__).resolve().parents[2] / "docs/recipes.md").read_text()
ISOLATION = "full" if os.geteuid() == 0 else "user"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("AGENTENV_ISOLATION", ISOLATION)


def recipe(heading: str, replaced: dict[str, str]) -> str:
    """The only Python block below a heading, on this machine's paths."""
    (section,) = [part for part in re.split(r"^#{2,3} ", PAGE, flags=re.MULTILINE) if part.startswith(heading + "\n")]
    block: str
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for shown, real in replaced.items():
        block = block.replace(shown, real)
    return block


def run(heading: str, **replaced: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(recipe(heading, replaced), heading, "exec", dont_inherit=True), names)
    return names


def test_packages_in_slots(capsys: pytest.CaptureFixture[str]) -> None:
    run("Packages in slots", **{"/srv/packages": str(fetch_runner())})
    assert capsys.readouterr().out.startswith("pytest ")


def test_git_in_slots(capsys: pytest.CaptureFixture[str]) -> None:
    run("git in slots")
    assert capsys.readouterr().out == "Policy, committed by agent: Add a\n\n"


def test_a_repository_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "remote").mkdir()
    git(tmp_path / "remote", "init", "--quiet")
    git(tmp_path / "remote", "commit", "--quiet", "--allow-empty", "--message", "theirs")
    real = {"https://git.example.com/acme/slugs.git": f"file://{tmp_path}/remote"}
    run("A repository cache", **real, **{"/srv/repositories": f"{tmp_path}/repositories"})
    assert capsys.readouterr().out == "mine\ntheirs\n\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="image slots need root, or ids of its own")
async def test_prepare_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_CACHE_DIR", str(tmp_path / "cache"))
    image = small_image(tmp_path / "layout")
    built = run("Prepare once", **{"registry.example.com/slugs:17": image})["Built"]

    def player(turn: Turn) -> Reply:
        look = Reply("", (Call("bash", {"command": "cat /build/log"}),))
        return look if turn.step == 0 else Reply("17" if "17 warnings" in turn.last_output else "none")

    async with environment(built, tmp_path, {"slugs": [player]}, **LOCAL, prepare="once") as env:
        group, _ = await env.collect_trajectories(await env.get_next_item())
        assert group is not None
        assert group["scores"] == [1.0] * 4
        assert (env.counts["prepared_count"], env.counts["prepared_reused"]) == (1, 3)


def test_many_sandboxes(capsys: pytest.CaptureFixture[str]) -> None:
    run("Many sandboxes")
    assert capsys.readouterr().out.split() == [str(number**2) for number in range(50)]


PLANT = """
echo 'def pytest_runtest_makereport(item, call): pass' > conftest.py
printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini
echo 'import os; os._exit(0)' | tee subprocess.py sitecustomize.py pytest.py > /dev/null
echo 'import os; os._exit(0)' > add.py
"""
PLAYERS = {
    "sed -i 's/ - / + /' add.py": 1.0,
    "true": 0.0,
    PLANT: 0.0,
    "rm add.py": 0.0,
}


async def test_hidden_tests_and_a_model_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("Hidden tests, and a verifier with pytest")
    script = [[Reply("", (Call("bash", {"command": command}),)), Reply("done")] for command in PLAYERS]
    async with ScriptedPolicy({"add": script}) as policy:
        real = {
            "http://127.0.0.1:9004/v1": policy.base_url,
            'tokenizer_name="Qwen/Qwen3-8B"': f"tokenizer_name={str(build_tokenizer(tmp_path))!r}, {LAID_OUT}",
            "/srv/packages": str(fetch_runner()),
        }
        block = textwrap.indent(recipe("Your own model server", real), "    ")
        exec(compile(f"async def played():\n{block}", "model server", "exec", dont_inherit=True), names)
        await names["played"]()
    assert capsys.readouterr().out.splitlines()[-1] == str(list(PLAYERS.values()))


LAID_OUT = "max_containers=1, slots_per_container=4, send_trajectory_id=True"


def test_every_setting_named_is_one() -> None:
    named = set(re.findall(r"--env\.(\w+)", PAGE))
    assert len(named) > 8
    assert named - set(AgentEnvConfig.model_fields) == set()
