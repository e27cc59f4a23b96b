"""How an agent program is named, checked and filled in."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.agent.program import AgentProgram
from agentenv.errors import ConfigError

KNOWN = {"url": "http://127.0.0.1:1/v1", "task": "do {url} and {cwd}", "key": "k", "context_tokens": "1000"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"argv": []}, "argv is []"),
        ({"argv": "codex exec"}, "argv is 'codex exec'"),
        ({"argv": ["x"], "cwd": "work"}, "cwd: 'work' is no absolute path"),
        ({"argv": ["x"], "files": {"~/.x": ""}}, "files: '~/.x' is no absolute path"),
        ({"argv": ["x"], "answer": "stderr"}, "answer is 'stderr'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        AgentProgram(**given)
    assert problem in str(refused.value)
    assert refused.value.next_step


def test_names_in_braces_are_replaced_once_and_other_braces_stay() -> None:
    program = AgentProgram(
        ["agent", "{task}", "{url}{key}", "{unknown} {} {{url}}"],
        env={"URL": "{url}", "{url}": "name"},
        files={"/{url}": '{"context": {context_tokens}, "url": "{url}"}'},
        plain_files={"/agent.py": "print(f'{task}')"},
    ).filled(KNOWN)
    url = KNOWN["url"]
    assert program.argv == ["agent", "do {url} and {cwd}", f"{url}k", "{unknown} {} {" + url + "}"]
    assert program.env == {"URL": url, "{url}": "name"}
    assert program.plain_files == {"/agent.py": "print(f'{task}')"}
    assert program.files == {"/{url}": f'{{"context": 1000, "url": "{url}"}}'}


@pytest.mark.parametrize(("given", "title"), [({}, "agent"), ({"name": "mine"}, "mine")])
def test_it_is_called_by_its_name_or_its_first_word(given: dict[str, Any], title: str) -> None:
    assert AgentProgram(["/opt/x/agent", "run"], **given).title == title
