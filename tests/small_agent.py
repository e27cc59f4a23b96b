"""An agent program of the tests, as somebody else might have written it: it knows nothing but OpenAI's chat API, whose
address is in OPENAI_BASE_URL. Run in slots: ``python3 small_agent.py BEHAVIOUR TASK``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

Message = dict[str, Any]

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
SYSTEM: Message = {"role": "system", "content": "You are a small agent."}


def ask(messages: list[Message], tools: list[Any] | None = None, **headers: str) -> Message:
    """The next message. Ends the program when it is refused."""
    body = {"model": "any", "messages": messages, **({"tools": tools} if tools else {})}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            found: Message = json.load(reply)["choices"][0]["message"]
            return found
    except urllib.error.HTTPError as error:
        print(f"refused with {error.code}: {error.read().decode()}", file=sys.stderr)
        raise SystemExit(1) from None


def results(answer: Message) -> list[Message]:
    """What the calls of an answer print."""
    found = []
    for call in answer.get("tool_calls") or []:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        content = f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
        found.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return found


def begun(task: str) -> list[Message]:
    return [SYSTEM, {"role": "user", "content": task}]


def unchanged(answer: Message) -> Message:
    return answer


def rewritten(answer: Message) -> Message:
    """As other programs send an answer back: arguments written anew, text stripped, no null, fields left out."""
    calls = [
        {
            "function": {
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1, sort_keys=True),
                "name": call["function"]["name"],
            },
            "id": call["id"],
            "type": "function",
        }
        for call in answer.get("tool_calls") or []
    ]
    text = [{"type": "text", "text": (answer.get("content") or "").strip()}]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def loop(messages: list[Message], sent_back: Any = unchanged, turns: int = 100) -> list[Message]:
    """Ask and run until there is no call."""
    for _ in range(turns):
        answer = ask(messages, [BASH])
        messages = [*messages, sent_back(answer), *results(answer)]
        if not answer.get("tool_calls"):
            break
    return messages


def plain(task: str) -> None:
    print(loop(begun(task))[-1]["content"])


def rewriting(task: str) -> None:
    print(loop(begun(task), rewritten)[-1]["content"][0]["text"])


def titled(task: str) -> None:
    """A title is asked for without tools, beside the first turn."""
    title = threading.Thread(target=ask, args=([{"role": "user", "content": f"A title for: {task}"}],))
    title.start()
    plain(task)
    title.join()


def twins(task: str) -> None:
    """The same is asked twice at once, on purpose."""
    found: list[Message] = []
    both = [threading.Thread(target=lambda: found.append(ask(begun(task), [BASH]))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    for answer in found:
        loop([*begun(task), answer, *results(answer)])


def forking(task: str) -> None:
    """Two sub-agents begin with what the main one has, and end before it goes on."""
    first = loop(begun(task), turns=1)
    for name in ("one", "two"):
        loop([*first, {"role": "user", "content": f"sub-agent {name}"}], rewritten, turns=2)
    loop(first)


def compacting(task: str) -> None:
    loop(begun(task), turns=2)
    loop([{"role": "system", "content": "Go on from this summary."}, {"role": "user", "content": task}])


def editing(task: str) -> None:
    """An answer is changed before it is sent back."""
    first = loop(begun(task), turns=1)
    first[2] = {**first[2], "content": "I said something else."}
    loop(first)


def retrying(task: str) -> None:
    """A request is sent again, as an SDK does that did not see the answer."""
    answer = ask(begun(task), [BASH])
    again = ask(begun(task), [BASH], **{"x-stainless-retry-count": "1"})
    assert again == answer, (again, answer)
    loop([*begun(task), again, *results(again)])


def straying(task: str) -> None:
    """A conversation of its own is refused in the middle, as a command of the policy may have it."""
    first = loop(begun(task), turns=1)
    with contextlib.suppress(SystemExit):
        ask([{"role": "system", "content": "stray"}])
    loop(first)


def silent(_: str) -> None:
    print("no such module", file=sys.stderr)
    raise SystemExit(3)


def failing(task: str) -> None:
    """It ends with another code than 0 after its turns."""
    plain(task)
    raise SystemExit(7)


def endless(task: str) -> None:
    """It goes on whatever it is answered, and ignores refusals."""
    while True:
        try:
            loop(begun(task), turns=1)
        except SystemExit:
            time.sleep(0.05)


def pestering(task: str) -> None:
    """It sends what is no request, again and again."""
    loop(begun(task), turns=1)
    while True:
        with contextlib.suppress(SystemExit):
            ask(5)  # type: ignore[arg-type]


def hanging(task: str) -> None:
    loop(begun(task), turns=1)
    print("hanging", flush=True)
    time.sleep(1000)


def deafening(task: str) -> None:
    """It kills everything else in its slot, also what leads to the gateway, and then itself waits."""
    loop(begun(task), turns=1)
    own = {os.getpid(), os.getppid(), 1}
    for process in pathlib.Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) not in own:
            os.kill(int(process.name), signal.SIGKILL)
    time.sleep(1000)


def noisy(task: str) -> None:
    sys.stdout.write("begin\n" + "x" * 3_000_000 + "\nend\n")
    sys.stdout.flush()
    loop(begun(task))


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
