"""After a seal the programs of a verifier run nothing that the policy left in its home directory."""

from __future__ import annotations

from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.tools.catalog import ToolCatalog
from agentenv.wire.calls import CallResult
from tests.contract.conftest import Maker

PLANT = r"""
set -e
site=$(python3 -c 'import site; print(site.getusersitepackages())')
mkdir -p "$site" ~/.local/bin
echo 'import sys; sys.stderr.write("PLANTED usercustomize\n")' > "$site/usercustomize.py"
echo 'echo PLANTED bashrc >&2' | tee ~/.bashrc > ~/.bash_profile
printf '[core]\n fsmonitor = "echo PLANTED global fsmonitor >&2; false"\n' > ~/.gitconfig
git init -q repo
cd repo
git config core.fsmonitor 'echo PLANTED local fsmonitor >&2; false'
printf '#!/bin/sh\necho PLANTED hook >&2\n' > .git/hooks/post-checkout
chmod +x .git/hooks/post-checkout
git config user.email a@b
git config user.name a
git commit -q --allow-empty -m one
"""

PROGRAMS = {
    "python": "python3 -c 'print(1)'",
    "bash": "bash -c true",
    "a login shell": "bash -lc true",
    "an interactive shell": "bash -ic true",
    "git": "git -C repo status",
    "git's hooks": "git -C repo checkout -q -b other",
}


async def run(session: ToolSession, command: str, **arguments: object) -> CallResult:
    result = await session.call("bash", {"command": command, **arguments}, timeout_s=60)
    assert result.fault == "none", result
    return result


async def test_what_lies_in_its_home_is_not_run(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    async with ToolExecutor(pool, ToolCatalog.builtin()) as executor, executor.open("policy") as session:
        planted = await run(session, PLANT)
        assert planted.exit_code == 0, planted.stderr
        for name in ("python", "a login shell", "git"):
            assert "PLANTED" in (await run(session, PROGRAMS[name])).stderr, "nothing was proved"
        await session.seal()
        for name, command in PROGRAMS.items():
            result = await run(session, command)
            assert "PLANTED" not in result.stderr, name
            assert result.exit_code == 0, f"{name}: {result.stderr}"
        told = (await run(session, 'echo "$HOME $PWD"; ls -d "$HOME"; ls -a repo | head -3')).stdout
        assert told.startswith("/nonexistent ")
        assert ".git" in told, "the workspace is as it was left"
        assert (await run(session, "echo $HOME", env={"HOME": "/workspace"})).stdout == "/workspace\n"


async def test_sessions_know_it_too(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    async with ToolExecutor(pool, ToolCatalog.builtin()) as executor, executor.open("policy") as session:
        await run(session, "echo 'echo PLANTED' > ~/.bashrc; cp ~/.bashrc ~/.bash_profile")
        await session.seal()
        for pty in (False, True):
            arguments = {"command": "echo at:$HOME:$PYTHONNOUSERSITE", "session": f"s{pty}", "pty": pty}
            result = await session.call("terminal", arguments, timeout_s=60)
            assert "at:/nonexistent:1" in result.stdout
            assert "PLANTED" not in result.stdout


async def test_the_next_lease_has_its_home_again(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    async with ToolExecutor(pool, ToolCatalog.builtin()) as executor:
        async with executor.open("first") as session:
            await session.seal()
            assert (await run(session, "echo $HOME")).stdout == "/nonexistent\n"
        async with executor.open("second") as session:
            home = (await run(session, "cd; pwd; echo $HOME; echo ${PYTHONNOUSERSITE-none}")).stdout.split()
            assert home[0] == home[1] != "/nonexistent"
            assert home[2] == "none"


async def test_a_checkpoint_s_files_have_their_home_again_until_the_next_seal(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    async with ToolExecutor(pool, ToolCatalog.builtin()) as executor, executor.open("policy") as session:
        home = (await run(session, "echo $HOME")).stdout
        checkpoint = await session.checkpoint()
        for _ in range(2):
            await session.seal()
            await session.checkpoint()  # which changes nothing, before and after
            assert (await run(session, "echo $HOME")).stdout == "/nonexistent\n"
            await session.restore(checkpoint)
            await session.checkpoint()
            assert (await run(session, "echo $HOME")).stdout == home


async def test_caches_have_a_place(make: Maker) -> None:
    pool, _ = await make.pool(slots=1)
    async with ToolExecutor(pool, ToolCatalog.builtin()) as executor, executor.open("policy") as session:
        await session.seal()
        assert (await run(session, "mkdir -p $XDG_CACHE_HOME/x && touch $XDG_CACHE_HOME/x/y")).exit_code == 0
