from __future__ import annotations

import statistics

import pytest

from agentenv.agent.parsers import PARSERS, ParsedCall, format_of
from agentenv.agent.results import MOST_ERRORS, MOST_READ, Missing, Results, faults_text, scores_text
from agentenv.agent.transcript import Step, Transcript
from agentenv.errors import Fault, InfraError, TaskError


def rollout(score: float | None, fault: Fault = "none", error: str = "") -> Transcript:
    return Transcript(trajectory="t", item_id="i", began_unix_s=0, score=score, fault=fault, error=error)


def test_mean_and_deviation_are_of_the_scored_ones() -> None:
    results, scores = Results(), [0.25, -1.0, 5.5, 1e6]
    for score in scores:
        results.add([rollout(score), rollout(None, "infra", "lost")])
    assert results.mean == pytest.approx(statistics.mean(scores))
    assert results.deviation == pytest.approx(statistics.stdev(scores))
    assert results.metrics() == {
        "items": 8, "scored": 4, "fault_infra": 4, "mean_score": results.mean, "sd_score": results.deviation,
    }  # fmt: skip


def test_nothing_has_no_mean() -> None:
    results = Results()
    results.add([rollout(None, "task", "bug")])
    assert (results.mean, results.deviation, results.groups) == (None, None, 0)
    assert "mean_score" not in results.metrics()


def test_errors_that_differ_in_numbers_only_are_one() -> None:
    results = Results()
    results.add([rollout(None, "infra", f"ContainerLostError: c-{n} at 0x7f{n}ab") for n in range(3)])
    results.add([rollout(None, "task", "TaskError: bug")])
    found = [(error.count, error.text) for error in results.errors.most_frequent()]
    assert found == [(3, "ContainerLostError: c-0 at 0x7f0ab"), (1, "TaskError: bug")]
    assert faults_text(results.faults) == "3 infra, 1 task"


def test_different_errors_are_bounded() -> None:
    results = Results()
    results.add([rollout(None, "task", f"error {'x' * n}") for n in range(MOST_ERRORS + 7)])
    assert (len(results.errors.most_frequent()), results.errors.omitted) == (MOST_ERRORS, 7)


def test_the_scores_of_a_large_group_are_cut() -> None:
    assert scores_text([rollout(1.0), rollout(None), rollout(0.3333)]) == "1 – 0.333"
    assert scores_text([rollout(1.0)] * 20).endswith("1 … (20)")


def test_what_is_missing_ends_a_command_with_an_error_that_names_it() -> None:
    missing = Missing()
    missing.check()
    assert missing.rows() == []
    for number in range(7):
        missing.no_score(f"item-{number}", [rollout(None, "task", "TaskError: a\n bug")] * 2)
    named = "7 items without a score: item-0, item-1, item-2, item-3, item-4 and 2 more"
    assert missing.rows() == [("dropped", named)]
    with pytest.raises(TaskError) as raised:
        missing.check()
    assert str(raised.value) == f"{named} (14 × TaskError: a bug)"
    missing.check(scores=False)
    missing.lost.add("record", "disk full", "")
    missing.lost.add("record", "disk full", "")
    missing.lost.add("group", "no permission", "")
    assert missing.rows()[1:] == [("lost", "2 records: disk full"), ("lost", "1 group: no permission")]
    with pytest.raises(InfraError) as raised_too:
        missing.check()
    assert str(raised_too.value).endswith("a bug); lost 2 records: disk full; lost 1 group: no permission")
    with pytest.raises(InfraError, match=r"^lost 2 records: disk full; lost 1 group: no permission$"):
        missing.check(scores=False)


def test_an_infrastructure_failure_among_those_of_the_task_is_ours() -> None:
    missing = Missing()
    missing.no_score("a", [rollout(None, "task", "TaskError: bug"), rollout(None, "infra", "ContainerLostError: died")])
    with pytest.raises(InfraError):
        missing.check()


def test_members_without_a_score_are_counted_where_others_have_one() -> None:
    results = Results()
    results.add([rollout(1.0), rollout(None, "infra", "x"), rollout(None, "policy")])
    results.add([rollout(None, "task", "x")] * 4)
    assert (results.partial, results.groups) == (2, 1)


def test_the_figures_do_not_depend_on_the_order_of_the_groups() -> None:
    scores = [0.1, 0.7, 1.0, 0.3, 1e9, 0.2, 0.0, 0.6] * 9
    figures = []
    for order in (scores, scores[::-1], sorted(scores)):
        results = Results()
        for score in order:
            results.add([rollout(score)])
        figures.append((results.mean, results.deviation))
    assert set(figures) == {(statistics.mean(scores), statistics.stdev(scores))}


SAME_MARKUP = {"qwen": "hermes", "glm47": "glm45"}


@pytest.mark.parametrize("name", PARSERS)
def test_the_format_of_unparsed_calls_is_named(name: str) -> None:
    text = PARSERS[name]().written([ParsedCall("bash", {"command": "ls"})])
    results = Results()
    for answer in ["I give up", text, "I give up"]:
        results.add([spoken(answer)])
    assert (results.calls, results.could_call, results.unparsed) == (0, 3, SAME_MARKUP.get(name, name))


@pytest.mark.parametrize(
    "text", ["", "I give up", "the answer is {1, 2}", "<b>no</b>", "```json\n[1]\n```", '{"a": 1}']
)
def test_text_without_a_call_has_no_format(text: str) -> None:
    assert format_of(text) == ""


def test_only_the_first_answers_are_searched_for_calls() -> None:
    results = Results()
    results.add([spoken("no")] * MOST_READ)
    results.add([spoken('<tool_call>{"name": "bash", "arguments": {}}</tool_call>')])
    assert (results.could_call, results.unparsed) == (MOST_READ + 1, "")


def spoken(answer: str) -> Transcript:
    step = Step(index=0, model_started_s=0, model_ended_s=1, message={"role": "assistant", "content": answer})
    return rollout(0.0).model_copy(update={"tools": ["bash"], "steps": [step]})
