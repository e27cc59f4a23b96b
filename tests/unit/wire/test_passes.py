"""Passes of runs: derived, unambiguous, and of one spelling."""

from __future__ import annotations

import base64
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.wire.passes import make_pass, run_of_pass

TOKEN = "c" * 32
RUNS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=128)


@given(RUNS, st.text(min_size=1, alphabet=string.hexdigits))
def test_a_pass_names_its_run_to_whoever_has_the_token(run: str, token: str) -> None:
    made = make_pass(token, run)
    assert run_of_pass(token, made) == run
    assert run_of_pass(token + "x", made) is None
    assert set(made) <= set(string.ascii_letters + string.digits + "-_.")


def test_a_pass_is_what_it_is() -> None:
    """Pinned: both sides of a farm derive it, perhaps of different releases."""
    proof = "2c1ee714eb7fc054aa7419b694ab4d1f4a654bd9b8a9a498b810840694675e08"
    assert make_pass(TOKEN, "team.a/exp 7") == f"p1.dGVhbS5hL2V4cCA3.{proof}"


@given(RUNS, RUNS)
def test_no_run_can_use_anothers_proof(run: str, other: str) -> None:
    proof = make_pass(TOKEN, run).rpartition(".")[2]
    name = make_pass(TOKEN, other).split(".")[1]
    assert run_of_pass(TOKEN, f"p1.{name}.{proof}") == (run if run == other else None)


def test_a_run_with_dots_is_not_taken_for_another() -> None:
    assert run_of_pass(TOKEN, make_pass(TOKEN, "a.b.c")) == "a.b.c"
    assert run_of_pass(TOKEN, make_pass(TOKEN, "p1.a.b")) == "p1.a.b"


@pytest.mark.parametrize(
    "changed",
    [
        lambda made: made + "=",
        lambda made: made.replace(".", "=.", 1),
        lambda made: made.replace("p1.YQ.", "p1.YQ==."),
        lambda made: made.replace("p1.YQ.", "p1.YR."),  # other unused bits: the same run to a lenient decoder
        lambda made: made.replace("p1.YQ.", "p1.Y\nQ."),
        lambda made: made.replace("p1.", "p2."),
        lambda made: made.upper(),
        lambda made: made[:-1],
        lambda made: made + ".",
        lambda made: " " + made,
        lambda made: made[:-1] + "é",
        lambda made: made[:-1] + "\udce9",
    ],
)
def test_another_spelling_is_no_pass(changed: object) -> None:
    made = make_pass(TOKEN, "a")
    assert made.startswith("p1.YQ.")
    assert callable(changed)
    assert changed(made) != made
    assert run_of_pass(TOKEN, changed(made)) is None


@given(st.text())
def test_nothing_else_is_a_pass(given_text: str) -> None:
    assert run_of_pass(TOKEN, given_text) is None
    assert run_of_pass(TOKEN, f"p1.{given_text}") is None
    name = base64.urlsafe_b64encode(given_text.encode(errors="surrogatepass")).decode()
    assert run_of_pass(TOKEN, f"p1.{name}.{'0' * 64}") is None


def test_there_is_no_pass_for_leases_without_a_run() -> None:
    with pytest.raises(ValueError, match="needs a run"):
        make_pass(TOKEN, "")
    proof = make_pass(TOKEN, "a").rpartition(".")[2]
    assert run_of_pass(TOKEN, f"p1..{proof}") is None
