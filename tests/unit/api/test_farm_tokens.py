"""Tokens of runs: what they cover, who accepts them, and that nothing else is accepted."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentenv.api.farm_server.tokens import Right, TokenKeys, bearer_token
from agentenv.errors import ConfigError, UnauthorizedError, from_wire
from agentenv.wire.farm import LONGEST_TOKEN_S, RUN_PATTERN, Scope

KEY, OTHER = "k" * 32, "o" * 40
KEYS = TokenKeys([KEY])
GOOD = KEYS.mint("team/exp7", "run", cap=8, expires_s=3600)
RUNS = st.from_regex(RUN_PATTERN, fullmatch=True).filter(lambda run: len(run) <= 128)
SCOPES = st.sampled_from(["admin", "run", "read"])


def encoded(part: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")


def header(token: str) -> dict[str, Any]:
    return jwt.get_unverified_header(token)


def claims(**changes: Any) -> dict[str, Any]:
    whole = {"sub": "a", "scope": "run", "jti": "j", "iat": int(time.time()), "exp": int(time.time()) + 3600}
    return {name: value for name, value in {**whole, **changes}.items() if value is not None}


def signed(key: str = KEY, algorithm: str = "HS256", kid: Any = None, **changes: Any) -> str:
    return jwt.encode(claims(**changes), key, algorithm=algorithm, headers={"kid": kid or header(GOOD)["kid"]})


def refusal(token: str, keys: TokenKeys = KEYS, denied: tuple[str, ...] = ()) -> str:
    with pytest.raises(UnauthorizedError) as caught:
        keys.verify(token, denied=denied)
    assert caught.value.field == "farm_token"
    assert caught.value.next_step
    assert KEY not in str(caught.value)
    assert len(token) < 40 or token not in str(caught.value)
    return caught.value.message


# -- rights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "covered", "not_covered"),
    [
        ("exp7", ["exp7"], ["exp", "exp77", "exp7/a", "", "*"]),
        ("team/*", ["team/a", "team/a/b"], ["team", "team/", "teamx/a", "teams", "x/team/a", ""]),
        ("team/sub/*", ["team/sub/a"], ["team/a", "team/subs/a", "team/sub"]),
        ("*", ["a", "team/a"], [""]),
    ],
)
def test_what_a_right_covers(run: str, covered: list[str], not_covered: list[str]) -> None:
    right = Right(run, "run", None, "j")
    assert [name for name in (*covered, *not_covered) if right.covers(name)] == covered
    assert right.only_run == ("" if "*" in run else run)


@given(RUNS, RUNS)
def test_a_team_covers_its_runs_only(team: str, run: str) -> None:
    right = Right(f"{team}/*", "run", None, "j")
    assert right.covers(f"{team}/{run}")
    assert not right.covers(f"{team}{run}") or run.startswith("/")
    assert right.covers(run) == (run.split("/")[: team.count("/") + 1] == team.split("/") and run != team)


# -- minted and verified ----------------------------------------------------------------------------


NEAR = st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=3).map("/".join)
"""Runs that often have to do with each other."""


@given(*[st.one_of(NEAR, NEAR.map("{}/*".format), st.just("*"))] * 2, NEAR)
def test_who_covers_a_pattern_covers_whatever_it_covers(mine: str, theirs: str, run: str) -> None:
    """So a token that is minted by the right of another reaches no further."""
    giver, taker = (Right(one, "admin", None, "j") for one in (mine, theirs))
    if giver.covers(theirs) and taker.covers(run):
        assert giver.covers(run)


@given(st.one_of(RUNS, RUNS.map("{}/*".format), st.just("*")), SCOPES, st.one_of(st.none(), st.integers(0, 10**6)))
def test_what_is_minted_is_verified(run: str, scope: Scope, cap: int | None) -> None:
    right = KEYS.verify(KEYS.mint(run, scope, cap=cap, expires_s=60))
    assert (right.run, right.scope, right.cap) == (run, scope, cap)


def test_tokens_have_ids_of_their_own() -> None:
    assert KEYS.verify(KEYS.mint("a", "run", expires_s=60)).jti != KEYS.verify(KEYS.mint("a", "run", expires_s=60)).jti


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"run": ""}, "run"), ({"run": "team/"}, "run"), ({"run": "a b"}, "run"), ({"run": "a*"}, "run"),
        ({"run": "/*"}, "run"), ({"run": "a\n"}, "run"), ({"run": "a" * 200}, "run"), ({"scope": "root"}, "scope"),
        ({"cap": -1}, "cap"), ({"expires_s": 0}, "expires_s"), ({"expires_s": -1}, "expires_s"),
        ({"expires_s": float("nan")}, "expires_s"), ({"expires_s": 2 * LONGEST_TOKEN_S}, "expires_s"),
    ],
)  # fmt: skip
def test_what_cannot_be_minted_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KEYS.mint(**{"run": "a", "scope": "run", "expires_s": 60, **arguments})
    assert caught.value.field == field


# -- refused ----------------------------------------------------------------------------------------


@given(st.one_of(st.text(), st.text("abcXYZ019-_.="), st.binary().map(lambda raw: raw.decode("latin-1"))))
def test_no_random_string_is_a_token(text: str) -> None:
    refusal(text)


@given(st.tuples(*[st.one_of(st.text("abcXYZ019-_"), st.sampled_from(GOOD.split(".")))] * 3))
def test_no_other_parts_are_a_token(parts: tuple[str, str, str]) -> None:
    assume(".".join(parts) != GOOD)
    refusal(".".join(parts))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "sub": st.one_of(st.just("*"), RUNS), "scope": SCOPES, "cap": st.one_of(st.none(), st.integers(0, 1000)),
            "exp": st.integers(0, 2**33), "jti": st.text("0123456789abcdef", min_size=1), "more": st.integers(),
        },
    )
)  # fmt: skip
def test_no_changed_claim_is_accepted(changes: dict[str, Any]) -> None:
    head, _, proof = GOOD.split(".")
    before = jwt.decode(GOOD, options={"verify_signature": False})
    assume({**before, **changes} != before)
    assert "changed" in refusal(f"{head}.{encoded({**before, **changes})}.{proof}")


@given(st.integers(0, len(GOOD) - 2), st.characters(codec="utf-8"))
def test_no_changed_character_is_accepted(at: int, character: str) -> None:
    """Of the last one, base64 does not read all bits."""
    changed = GOOD[:at] + character + GOOD[at + 1 :]
    assume(changed != GOOD)
    refusal(changed)


@pytest.mark.parametrize(
    "token",
    [
        f"{encoded({'alg': 'none', 'typ': 'JWT', 'kid': header(GOOD)['kid']})}.{encoded(claims())}.",
        f"{encoded({'alg': 'None', 'kid': header(GOOD)['kid']})}.{encoded(claims())}.{GOOD.rpartition('.')[2]}",
        signed(OTHER),  # another key under the name of the right one
        signed(OTHER * 2, "HS512"),
        signed(KEY * 2, "HS384"),
        signed(KEY * 2, "HS512"),
        signed(sub=None),
        signed(exp=None),
        signed(jti=None),
        signed(scope=None),
        signed(scope="root"),
        signed(cap=-1),
        signed(cap="8"),
        signed(cap=True),
        signed(sub="team/"),
        signed(sub="a\n"),
        signed(jti=""),
        signed(nbf=int(time.time()) + 3600),
        GOOD + "x" * 4096,
        f"{'W1tb' * 300}.{encoded(claims())}.x",
        f"{base64.urlsafe_b64encode(b'[' * 1400).decode().rstrip('=')}.{encoded(claims())}.x",
        GOOD[:-1] + "\ud800",
        GOOD + "\n",
        " " + GOOD,
    ],
)
def test_what_is_not_signed_or_not_whole_is_refused(token: str) -> None:
    refusal(token)


def test_each_refusal_says_why() -> None:
    assert "missing" in refusal("")
    assert "expired" in refusal(signed(exp=int(time.time()) - 1))
    assert "does not accept" in refusal(TokenKeys([OTHER]).mint("a", "admin", expires_s=60))
    assert "does not accept" in refusal(signed(kid="0123456789abcdef"))
    assert KEYS.verify(signed(jti="seven"), denied=("eight",)).jti == "seven"
    assert "revoked" in refusal(signed(jti="seven"), denied=("six", "seven"))


def test_a_refusal_is_the_clients_setting_on_the_other_side() -> None:
    with pytest.raises(UnauthorizedError) as caught:
        KEYS.verify("")
    error = caught.value
    there = from_wire(error.code, error.message, error.next_step)
    assert isinstance(there, UnauthorizedError)
    assert (there.field, str(there)) == ("farm_token", str(error))


@pytest.mark.parametrize(
    ("given_header", "token"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", ""), ("abc", ""), ("", ""), (None, "")],
)
def test_the_token_of_a_header(given_header: str | None, token: str) -> None:
    assert bearer_token(given_header) == token


# -- keys -------------------------------------------------------------------------------------------


def test_two_keys_are_accepted_while_they_are_replaced() -> None:
    before, between, after = TokenKeys([OTHER]), TokenKeys([KEY, OTHER]), TokenKeys([KEY])
    old, new = before.mint("a", "run", expires_s=60), between.mint("a", "run", expires_s=60)
    assert header(new) == header(after.mint("a", "run", expires_s=60)) != header(old)
    assert between.verify(old).run == between.verify(new).run == after.verify(new).run == "a"
    refusal(new, before)
    refusal(old, after)


def test_the_first_key_file_is_made_for_its_owner(tmp_path: Path) -> None:
    path, second = tmp_path / "farm.key", tmp_path / "old.key"
    with pytest.raises(ConfigError, match=r"farm\.key.*\n?.* holds no key.*\n?.*agentenv farm serve"):
        TokenKeys.read([path])
    assert not path.exists(), "a token of a new key would be refused by every farm"
    token = TokenKeys.read([path], create=True).mint("a", "run", expires_s=60)
    assert path.stat().st_mode & 0o777 == 0o600
    assert TokenKeys.read([path]).verify(token).run == "a"
    assert [each.name for each in tmp_path.iterdir()] == ["farm.key"]
    with pytest.raises(ConfigError, match=r"old\.key.*\n?.*holds no key"):
        TokenKeys.read([path, second])
    second.write_text(OTHER + "\n")
    second.chmod(0o600)
    assert TokenKeys.read([path, second]).verify(TokenKeys([OTHER]).mint("b", "run", expires_s=60)).run == "b"
    assert OTHER not in repr(TokenKeys.read([second]))


def test_a_key_that_others_may_read_or_guess_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "farm.key"
    for mode in (0o640, 0o604, 0o620):
        path.write_text(KEY)
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            TokenKeys.read([path])
    path.chmod(0o600)
    for content in (b"", b"short", b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"tokens\.key_files") as caught:
            TokenKeys.read([path])
        assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be created"):
        TokenKeys.read([tmp_path / "no" / "farm.key"], create=True)
    for keys in ([], [KEY, "short"]):
        with pytest.raises(ConfigError, match="at least 32"):
            TokenKeys(keys)
    with pytest.raises(ConfigError):
        TokenKeys.read([])
