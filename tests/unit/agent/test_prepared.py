"""The prepared states of an environment: which is chosen, which is given up."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agentenv.agent.prepared import Key, PreparedState, PreparedStates
from agentenv.executor.session import Checkpoint
from tests.unit.agent.agent_stubs import ROOT


def state(key: str, container: str = "c0") -> PreparedState:
    return PreparedState((key, ""), Checkpoint(container, ROOT), 1.0)


def test_the_state_with_the_fewest_users_is_chosen() -> None:
    states = PreparedStates()
    near, far, other = state("a"), state("a", "c1"), state("b")
    for one in (near, far, other):
        assert states.keep(one) == []
    states.begun(near)
    assert states.choose(("a", "")) is far
    assert states.choose(("a", ""), [far]) is near
    assert states.choose(("a", ""), [far, near]) is None
    assert states.choose(("a", "another root")) is None
    states.ended(near)
    states.begun(far)
    assert states.choose(("a", "")) is near


def test_a_newer_state_replaces_that_of_its_key_in_its_container() -> None:
    states = PreparedStates()
    old, elsewhere, new = state("a"), state("a", "c1"), state("a")
    states.keep(old)
    states.keep(elsewhere)
    assert states.keep(new) == [old]
    assert len(states) == 2


def test_the_least_recently_chosen_is_given_up_unless_it_is_used() -> None:
    states = PreparedStates(most=3)
    first, second, third, fourth = (state(name) for name in "abcd")
    for one in (first, second, third):
        states.keep(one)
    states.choose(first.key)
    assert states.oldest_unused("c0") is second
    states.begun(second)
    assert states.oldest_unused("c0") is third
    assert states.oldest_unused("c1") is None
    assert states.keep(fourth) == [second], "the number is bounded whoever uses them"
    states.ended(second)
    assert states.choose(second.key) is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_bounds_hold(seed: int) -> None:
    chance, states = random.Random(seed), PreparedStates(most=4)
    kept: list[PreparedState] = []
    users: Counter[PreparedState] = Counter()
    for _ in range(400):
        key: Key = (chance.choice("abcdef"), chance.choice(["", "root"]))
        match chance.choice(["keep", "choose", "forget", "begun", "ended", "oldest"]):
            case "keep":
                new = PreparedState(key, Checkpoint(chance.choice(["c0", "c1"]), ROOT), 1.0)
                replaced = states.keep(new)
                assert all(one.checkpoint.container == new.checkpoint.container for one in replaced)
                kept = [one for one in kept if one not in replaced] + [new]
            case "choose":
                avoided = chance.sample(kept, len(kept) // 3)
                chosen = states.choose(key, avoided)
                allowed = [one for one in kept if one.key == key and one not in avoided]
                assert chosen in allowed if allowed else chosen is None
                assert chosen is None or users[chosen] == min(users[one] for one in allowed)
            case "forget" if kept:
                states.forget(kept.pop(chance.randrange(len(kept))))
            case "begun" if kept:
                users.update([one := chance.choice(kept)])
                states.begun(one)
            case "ended" if running := list(users.elements()):
                users.subtract([one := chance.choice(running)])
                states.ended(one)
            case "oldest":
                oldest = states.oldest_unused("c0")
                unused = [one for one in kept if one.checkpoint.container == "c0" and not users[one]]
                assert oldest in unused if unused else oldest is None
        assert len(states) == len(kept)
        for container in ("c0", "c1"):
            here = [one.key for one in kept if one.checkpoint.container == container]
            assert len(here) == len(set(here)) <= 4
