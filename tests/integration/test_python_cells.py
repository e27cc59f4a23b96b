"""Python cells in a slot: state, results as notebooks show them, interrupts, ends, and what a hostile cell can do."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import pytest

from agentenv import AsyncSandbox, Sandbox
from agentenv.errors import InvalidArgumentsError, PoolClosedError
from agentenv.sdk.python import PythonResult, SlotPython


@pytest.fixture(params=["fake", "local"])
async def box(request: pytest.FixtureRequest) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(request.param, start_timeout_s=300) as opened:
        yield opened


@pytest.fixture
async def python(box: AsyncSandbox) -> AsyncIterator[SlotPython]:
    async with box.python() as opened:
        yield opened


async def test_cells_share_their_names_and_show_the_last_expression(python: SlotPython) -> None:
    assert await python.run("x = 41") == PythonResult()
    result = await python.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nx + 1")
    assert (result.text, result.stdout, result.stderr, result.success) == ("42", "out\n", "err\n", True)
    assert (await python.run("_ * 2")).text == "84"
    assert (await python.run("x;")).text is None
    assert (await python.run("import asyncio\nawait asyncio.sleep(0, 'awaited')")).text == "'awaited'"
    assert (await python.run("import os\nos.system('echo child; echo complains >&2')")).stderr == "complains\n"
    pickled = "import pickle\nclass A: pass\nisinstance(pickle.loads(pickle.dumps(A())), A)"
    assert (await python.run(pickled)).text == "True"


SHOWN = """
class Shown:
    def _repr_html_(self): return "<b>shown</b>"
    def _repr_png_(self): return b"PNG"
    def _repr_mimebundle_(self, include, exclude): return {"application/json": {"a": [1]}}
display(Shown())
print("between")
Shown()
"""


async def test_values_are_shown_as_mime_bundles(python: SlotPython) -> None:
    result = await python.run(SHOWN)
    assert [output.is_result for output in result.outputs] == [False, True]
    shown = result.outputs[1]
    assert (shown.html, shown.png, shown.json) == ("<b>shown</b>", b"PNG", {"a": [1]})
    assert shown.data["image/png"] == base64.b64encode(b"PNG").decode()
    assert "Shown object" in shown.text
    assert shown._repr_mimebundle_() == shown.data
    broken = await python.run("class Broken:\n    def _repr_html_(self): raise ValueError('no html')\nBroken()")
    assert broken.success
    assert "no html" in broken.stderr


async def test_what_is_no_code_is_refused_and_the_interpreter_stays(python: SlotPython) -> None:
    with pytest.raises(InvalidArgumentsError, match="code is 5, of type int"):
        await python.run(5)  # type: ignore[arg-type]
    assert (await python.run("6 * 7")).text == "42"


async def test_exceptions_are_data_with_a_traceback_of_the_cell(python: SlotPython) -> None:
    failed = (await python.run("def halve(x):\n    return x / 0\nhalve(1)")).error
    assert failed is not None
    assert (failed.name, failed.value) == ("ZeroDivisionError", "division by zero")
    assert '"<cell 1>", line 2, in halve' in failed.traceback
    assert "return x / 0" in failed.traceback
    assert "interpreter" not in failed.traceback
    for code, name in (("def f(:", "SyntaxError"), ("import sys\nsys.exit(3)", "SystemExit"), ("input()", "EOFError")):
        error = (await python.run(code)).error
        assert error is not None
        assert error.name == name


async def test_output_comes_as_it_is_printed_and_large_output_is_cut(python: SlotPython) -> None:
    seen: list[tuple[str, str]] = []
    code = "import sys, time\nfor n in range(3): print(n); time.sleep(0.05)\nprint('e', file=sys.stderr)"
    assert (await python.run(code, on_output=lambda stream, text: seen.append((stream, text)))).stdout == "0\n1\n2\n"
    assert "".join(text for stream, text in seen if stream == "stdout") == "0\n1\n2\n"
    large = await python.run("print('a' * 20_000_000 + 'b')")
    assert large.truncated
    assert large.stdout.startswith("aaaa")
    assert large.stdout.endswith("ab\n")
    assert len(large.stdout) < 1_100_000
    shown = await python.run("'z' * 5_000_000")
    assert shown.truncated
    assert shown.text is not None
    assert "characters dropped" in shown.text
    assert (await python.run("1")).text == "1"


LATER = """
import os, threading, time
def later():
    while not os.path.exists("go2"): time.sleep(0.01)
    print("later")
    open("printed", "w").close()
threading.Thread(target=later).start()
"""


async def test_what_is_printed_between_cells_is_the_next_ones(box: AsyncSandbox, python: SlotPython) -> None:
    waiting = "until [ -e go ]; do sleep 0.05; done; echo late"
    assert (await python.run(f"import subprocess\nlate = subprocess.Popen('{waiting}', shell=True)")).stdout == ""
    assert (await python.run("open('go', 'w').close()\nlate.wait();")).stdout == "late\n"
    await python.run(LATER)
    await box.run("touch go2; until [ -e printed ]; do sleep 0.02; done")
    printed = ""
    while not printed:  # on a loaded machine it has not been printed by then
        printed = (await python.run("")).stdout
    assert printed == "later\n"


async def test_a_callback_that_raises_interrupts_its_cell_alone(python: SlotPython) -> None:
    def raising(stream: str, text: str) -> None:
        raise LookupError(stream + text)

    await python.run("x = 1\nimport time")
    with pytest.raises(LookupError, match="stdouthello"):
        await python.run("print('hello')\nprint('more')\ntime.sleep(1000)", on_output=raising)
    assert (await python.run("x")).text == "1"


async def test_a_process_that_a_cell_forks_ends_with_the_cell(python: SlotPython) -> None:
    forked = await python.run("import os\nif child := os.fork(): os.waitpid(child, 0)\nbool(child)", 60)
    assert (forked.text, forked.timed_out) == ("True", False)
    assert (await python.run("1 + 1")).text == "2"


async def test_a_cell_is_interrupted_at_its_timeout_and_on_request(python: SlotPython) -> None:
    await python.run("x = 1")
    late = await python.run("while True: pass", 0.5)
    assert late.timed_out
    assert not late.ended
    assert late.error is not None
    assert late.error.name == "KeyboardInterrupt"
    running = asyncio.create_task(python.run("print('on', flush=True)\nimport time\ntime.sleep(1000)"))
    while not running.done():  # not before the cell has begun
        await asyncio.sleep(0.2)
        await python.interrupt()
    assert running.result().error is not None
    cancelled = asyncio.create_task(python.run("time.sleep(1000)"))
    await asyncio.sleep(0.2)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await python.interrupt()
    assert (await python.run("x")).text == "1"


async def test_a_cell_that_has_yet_to_begin_is_interrupted_then_and_loses_no_state(
    box: AsyncSandbox, python: SlotPython
) -> None:
    pid = (await python.run("import os\nx = 1\nos.getpid()")).text
    await box.run(f"kill -STOP {pid}")
    running = asyncio.create_task(python.run("while True: pass", 0.2))
    await asyncio.sleep(1)
    await box.run(f"kill -CONT {pid}")
    late = await running
    assert (late.timed_out, late.ended) == (True, False)
    assert (await python.run("x")).text == "1"


async def test_an_interpreter_that_ends_takes_its_names_along(python: SlotPython) -> None:
    await python.run("x = 1")
    ended = await python.run("print('last', flush=True)\nimport os\nos._exit(7)")
    assert ended.ended
    assert str(ended.error) == "InterpreterEnded: exit code 7"
    error = (await python.run("x")).error
    assert error is not None
    assert error.name == "NameError"
    deaf = await python.run("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", 5)
    assert deaf.timed_out
    assert deaf.ended
    await python.run("y = 2")
    await python.restart()
    assert (await python.run("'y' in globals()")).text == "False"


HOSTILE = {
    "frames that are none": "import contextlib, os\nfor fd in range(3, 20):\n"
    "    with contextlib.suppress(OSError): os.write(fd, b'\\xff' * 64)",
    "a frame without a meaning": "import os\nos.write(4, b'\\0\\0\\0\\x02[]')",
    "endless": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "closed": "import os\nos.closerange(0, 100)",
    "a fork that goes on": "import os\nif os.fork(): os.wait()",
    "deep json": "class A:\n    def _repr_json_(self):\n        a = []\n"
    "        for _ in range(10**5): a = [a]\n        return a\nA()",
}


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
async def test_what_a_cell_does_to_its_interpreter_is_no_failure_of_ours(python: SlotPython, code: str) -> None:
    await python.run(code, 5)
    assert (await python.run("1 + 1", 30)).text == "2"


async def test_a_slot_without_python_says_so(box: AsyncSandbox) -> None:
    for program, why in (("nopython", "cannot start"), ("cat", "invalid option"), ("true", "true ended")):
        with pytest.raises(InvalidArgumentsError, match=why):
            await box.python(program=program).run("1")
    async with box.python() as python:
        with pytest.raises(InvalidArgumentsError, match="timeout_s is 0"):
            await python.run("1", 0)
        await python.run("1")
    with pytest.raises(PoolClosedError):
        await python.run("1")


async def test_cells_run_beside_other_calls_and_where_the_call_says(box: AsyncSandbox) -> None:
    await box.run("mkdir -p below")
    async with box.python(cwd="below", env={"GIVEN": "1"}) as python:
        waiting = asyncio.create_task(
            python.run("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n1")
        )
        assert (await box.run("touch below/go")).exit_code == 0
        assert (await waiting).text == "1"
        assert (await python.run("os.environ['GIVEN']")).text == "'1'"


def test_the_same_without_asyncio() -> None:
    with Sandbox("fake") as box, box.python() as python:
        assert python.run("6 * 7").text == "42"
        python.restart()
        assert "running" in repr(python)
