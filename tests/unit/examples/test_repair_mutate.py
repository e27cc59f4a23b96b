"""Mutations: deterministic, small, reversible, and they compile."""

from __future__ import annotations

import pytest

from examples.repair import mutate
from tests.unit.examples.repair_sample import SOURCE


def test_candidates_depend_on_the_seed_only() -> None:
    assert list(mutate.candidates(SOURCE, 1)) == list(mutate.candidates(SOURCE, 1))
    assert set(mutate.candidates(SOURCE, 1)) == set(mutate.candidates(SOURCE, 2))


def test_each_candidate_compiles_changes_the_text_and_can_be_undone() -> None:
    found = list(mutate.candidates(SOURCE, 1))
    assert {m.kind for m in found} >= {"comparison", "boolean", "operator", "swapped arguments", "dropped return"}
    for mutation in found:
        broken = mutate.apply(SOURCE, [mutation])
        assert broken != SOURCE
        compile(broken, "broken", "exec")
        raw = broken.encode()
        end = mutation.start + len(mutation.after.encode())
        assert (raw[: mutation.start] + mutation.before.encode() + raw[end:]).decode() == SOURCE


def test_a_mutation_of_another_text_is_refused() -> None:
    mutation = next(mutate.candidates(SOURCE, 1))
    with pytest.raises(mutate.StaleMutationError):
        mutate.apply("# a line more\n" + SOURCE, [mutation])


def test_overlapping_mutations_are_refused() -> None:
    mutation = next(mutate.candidates(SOURCE, 1))
    with pytest.raises(mutate.StaleMutationError):
        mutate.apply(SOURCE, [mutation, mutation])


def test_docstrings_and_raised_messages_are_left_alone() -> None:
    source = 'def f(x):\n    """1 < 2"""\n    if x:\n        raise ValueError("a", 1)\n    return x\n'
    assert {mutation.kind for mutation in mutate.candidates(source, 1)} == {"dropped return"}


def test_a_diff_names_the_file_and_shows_both_lines() -> None:
    shown = mutate.diff("a.py", "x = 1\n", "x = 2")
    assert shown.startswith("--- a/a.py\n+++ b/a.py\n")
    assert "-x = 1\n+x = 2\n\\ No newline at end of file\n" in shown
