"""Writes docs/tools.md: ``python scripts/tools_page.py``.

Arguments, defaults, limits and replies come from the code; the examples are called, on the fake backend and on a
tool server over loopback, and their answers are what came back. What is written by hand is in tools_page.toml.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Set
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from aiohttp import web
from pydantic import BaseModel

from agentenv.api.assembly import tool_server
from agentenv.api.tool_server.core import ToolServer
from agentenv.api.tool_server.settings import ToolServerSettings
from agentenv.api.web.search import SearchResult
from agentenv.config import ContainerSettings, PoolSettings
from agentenv.executor.session import ToolSession
from agentenv.executor.tool_executor import ToolExecutor
from agentenv.slots.backends.base import ContainerBackend
from agentenv.slots.backends.fake import FakeBackend
from agentenv.slots.pool import SlotPool
from agentenv.tools.catalog import ToolCatalog
from agentenv.tools.schema import parameters_schema
from agentenv.wire import sessions, tools
from agentenv.wire.calls import CallResult
from agentenv.wire.toolserver import CallScope, ToolCallRequest, ToolDescription

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs/tools.md"
SITE: Final = "http://site.example"
"""What the page calls the web server of the examples, whose port is another each time."""
ANOTHER: Final = frozenset({"runs_s", "running_s", "modified_s", "data", "image"})
"""Fields of replies that are never the same twice: shown as "…"."""
UNSHOWN: Final = frozenset({"waited_s", "recording"})
"""Fields that are not even always there. An example may name more (``unshown``): what it does not wait for."""
SHOWN: Final = ("fault", "error", "message", "exit_code", "timed_out", "stdout", "stderr", "content")
LONGEST: Final = 400
"""Texts of more characters are cut on the page."""
_SECONDS: Final = re.compile(r"\b\d+\.\d s\b")

Call = Callable[[str, Mapping[str, Any]], Awaitable[CallResult]]
Written = Mapping[str, Any]
"""What tools_page.toml says."""
Answers = Mapping[str, list[str]]
"""By tool: the answer of each of its examples, as the page shows it."""


def written() -> Written:
    """The hand-written part."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


# -- asking ------------------------------------------------------------------------------------------


async def answers(backend: ContainerBackend, text: Written) -> dict[str, list[str]]:
    """Call every example, in the page's order: those of slot tools in one slot of ``backend``."""
    found: dict[str, list[str]] = {}
    async with slot(backend) as session, site() as address, server(address) as external:
        workspace = (await session.call("bash", {"command": "pwd"})).stdout.strip()
        names = {workspace: "/workspace", address: SITE}
        for tool, said in text["tool"].items():
            call = session.call if tool in ToolCatalog.builtin() else asking(external)
            found[tool] = [await answer(call, tool, example, names) for example in said["example"]]
    return found


async def answer(call: Call, tool: str, example: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """The answer of one example. ``names``: what the page calls things that have another name each time."""
    arguments = json.dumps(example["call"])
    for real, shown in names.items():
        arguments = arguments.replace(f"{shown}/", f"{real}/") if shown == SITE else arguments
    result = await call(tool, json.loads(arguments))
    return shown_answer(result, names, UNSHOWN | set(example.get("unshown", ())))


def shown_answer(result: CallResult, names: Mapping[str, str], unshown: Set[str]) -> str:
    """The fields that say something, one on a line."""
    plain = CallResult(id="-").model_dump(mode="json")
    given = {key: value for key, value in result.model_dump(mode="json").items() if key in SHOWN and key not in unshown}
    lines = [f'  "{key}": {_dumped(told(value, unshown))}' for key, value in given.items() if value != plain[key]]
    text = "{\n" + ",\n".join(lines) + "\n}"
    for real, shown in names.items():
        text = text.replace(real, shown)
    return _SECONDS.sub("… s", text)


def told(value: object, unshown: Set[str]) -> object:
    """``value`` without what is empty, or never the same."""
    if isinstance(value, Mapping):
        kept = {key: each for key, each in value.items() if key not in unshown and each not in (None, "", [], {})}
        return {key: "…" if key in ANOTHER else told(each, unshown) for key, each in kept.items()}
    if isinstance(value, list):
        return [told(each, unshown) for each in value]
    return value[:LONGEST] + "…" if isinstance(value, str) and len(value) > LONGEST else value


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@asynccontextmanager
async def slot(backend: ContainerBackend) -> AsyncIterator[ToolSession]:
    """One slot of it."""
    async with AsyncExitStack() as stack:
        settings = PoolSettings(min_containers=1, max_containers=1, acquire_timeout_s=120)
        pool = await stack.enter_async_context(SlotPool(backend, settings))
        executor = await stack.enter_async_context(ToolExecutor(pool, ToolCatalog.builtin()))
        yield await stack.enter_async_context(executor.open("tools-page"))


@asynccontextmanager
async def site() -> AsyncIterator[str]:
    """A web server of the pages of tools_page.toml; its address."""
    pages = written()["site"]

    async def serve(request: web.Request) -> web.Response:
        page = pages.get(request.path)
        if page is None:
            return web.Response(status=404, text="no such page")
        return web.Response(text=page["text"], content_type=page["type"])

    app = web.Application()
    app.router.add_get("/{tail:.*}", serve)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class OneFinding:
    """A search provider for the examples."""

    async def search(self, query: str, count: int) -> list[SearchResult]:
        """Always the same."""
        return [SearchResult(title="Opening hours", url=f"{SITE}/", snippet=f"About {query}.")][:count]


@asynccontextmanager
async def server(address: str) -> AsyncIterator[ToolServer]:
    """The shipped tools; only that address may be reached."""
    host, _, port = address.removeprefix("http://").partition(":")
    settings = ToolServerSettings.model_validate({"network": {"allow": [{"host": host, "ports": [int(port)]}]}})
    async with tool_server(settings, search=OneFinding()) as opened:
        yield opened


def asking(opened: ToolServer) -> Call:
    """Calls of one trajectory to a tool server."""

    async def call(tool: str, arguments: Mapping[str, Any]) -> CallResult:
        scope = CallScope(trajectory="tools-page")
        while True:  # until it has an answer: a first browser start may take longer than one question waits
            request = ToolCallRequest(
                id=uuid4().hex, scope=scope, tool=tool, arguments=dict(arguments), timeout_s=120, boot=opened.boot
            )
            reply = await opened.call(request.model_copy(update={"wait_s": 60.0}))
            if reply.result is not None:
                return reply.result

    return call


# -- rendering ---------------------------------------------------------------------------------------


def page(text: Written, given: Answers, external: Iterable[ToolDescription]) -> str:
    """The whole page. Raises ValueError naming what tools_page.toml lacks, or has too much of."""
    outside = {each.name: each for each in external}
    check(text, outside)
    parts = [text["intro"].strip(), _overview(text), "## Tools of a slot"]
    parts += [_slot_tool(name, text, given[name]) for name in ToolCatalog.builtin().names]
    parts += ["## Tools of a tool server", text["server_intro"].strip()]
    parts += [_external_tool(each, text, given[each.name]) for each in outside.values()]
    return "\n\n".join(parts) + "\n"


def check(text: Written, external: Iterable[str]) -> None:
    """Every tool there is is described, and every action of it has an example. Raises ValueError."""
    catalog = ToolCatalog.builtin()
    wanted, there = [*catalog.names, *external], list(text["tool"])
    if wanted != there:
        raise ValueError(f"tools_page.toml has the tools {there}, there are {wanted}")
    for spec in catalog.specs:
        action = parameters_schema(spec.arguments)["properties"].get("action", {})
        shown = {example["call"].get("action") for example in text["tool"][spec.name]["example"]}
        if missing := set(action.get("enum", ())) - shown:
            raise ValueError(f"{spec.name}: no example of {', '.join(sorted(missing))}")
    for name, said in text["tool"].items():
        if not said["example"] or not said["limits"]:
            raise ValueError(f"{name}: give examples and limits")


def _overview(text: Written) -> str:
    rows = ["| tool | purpose |", "|---|---|"]
    rows += [f"| [`{name}`](#{name}) | {said['about']} |" for name, said in text["tool"].items()]
    return "\n".join(rows)


def _slot_tool(name: str, text: Written, given: list[str]) -> str:
    spec, said = ToolCatalog.builtin().spec(name), text["tool"][name]
    replies = "\n\n".join(_reply(reply, text["fields"]) for reply in said.get("replies", ()))
    return "\n\n".join(
        part
        for part in (
            f"### {name}",
            spec.description,
            f"More: {said['more']}" if "more" in said else "",
            _arguments(parameters_schema(spec.arguments)),
            _limits(said["limits"]),
            f"**Answer.** {said['answer'].strip()}",
            replies,
            _examples(name, said["example"], given),
        )
        if part
    )


def _external_tool(tool: ToolDescription, text: Written, given: list[str]) -> str:
    said = text["tool"][tool.name]
    limits = [f"Ends after {tool.timeout_s:g} s.", *said["limits"]]
    return "\n\n".join(
        (
            f"### {tool.name}",
            tool.description,
            _arguments(tool.parameters),
            _limits(limits),
            f"**Answer.** {said['answer'].strip()}",
            _examples(tool.name, said["example"], given),
        )
    )


def _arguments(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = ["| argument | type | default | allowed | |", "|---|---|---|---|---|"]
    for name, node in schema["properties"].items():
        default = "*required*" if name in required else _default(node)
        rows.append(
            f"| `{name}` | {_type(node)} | {default} | {_allowed(node)} | {_cell(node.get('description', ''))} |"
        )
    return "\n".join(rows)


def _default(node: Mapping[str, Any]) -> str:
    return f"`{json.dumps(node['default'])}`" if "default" in node else ""


def _type(node: Mapping[str, Any]) -> str:
    if node.get("contentEncoding") == "base64":
        return "base64"
    if node.get("type") == "array":
        return f"list of {_type(node['items'])}s" if "items" in node else "list"
    return str(node.get("type", "any"))


def _allowed(node: Mapping[str, Any]) -> str:
    said = [", ".join(f"`{each}`" for each in node.get("enum", ()))]
    for least, most, what in (("minimum", "maximum", ""), ("minLength", "maxLength", " characters")):
        if least in node and most in node:
            said.append(f"{node[least]:,g} to {_number(node[most])}{what}")
        elif least in node or most in node:
            said.append(f"from {node[least]:g}{what}" if least in node else f"to {_number(node[most])}{what}")
    if "maxItems" in node:
        said.append(f"at most {node['maxItems']:,}")
    if "pattern" in node:
        said.append(f"`{node['pattern']}`")
    return _cell("; ".join(each for each in said if each))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _limits(limits: Iterable[str]) -> str:
    return "**Limits.**\n\n" + "\n".join(f"- {each}" for each in limits)


def _reply(name: str, fields: Mapping[str, Mapping[str, str]]) -> str:
    model: type[BaseModel] = getattr(sessions, name, None) or getattr(tools, name)
    if list(model.model_fields) != list(fields.get(name, {})):
        raise ValueError(f"tools_page.toml: [fields.{name}] must have {', '.join(model.model_fields)}, in this order")
    properties = parameters_schema(model)["properties"]
    rows = [f"| `{name}` | type | |", "|---|---|---|"]
    rows += [f"| `{field}` | {_type(properties[field])} | {fields[name][field]} |" for field in model.model_fields]
    return "\n".join(rows)


def _examples(tool: str, examples: Iterable[Mapping[str, Any]], given: list[str]) -> str:
    parts = ["**Examples.**"]
    for example, answered in zip(examples, given, strict=True):
        call = json.dumps({"name": tool, "arguments": example["call"]}, ensure_ascii=False)
        parts.append(f"{example['says']}\n\n```json\n{call}\n```\n\n```json\n{answered}\n```")
    return "\n\n".join(parts)


async def rendered(backend: ContainerBackend) -> str:
    """The page, its examples called on this backend."""
    text = written()
    async with tool_server(ToolServerSettings(), search=OneFinding()) as described:
        external = described.describe().tools
    return page(text, await answers(backend, text), external)


def main() -> None:
    """Write it."""
    whole = asyncio.run(rendered(FakeBackend(ContainerSettings(slots_per_container=1))))
    PAGE.write_text(whole, encoding="utf-8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}: {len(whole.splitlines())} lines\n")


if __name__ == "__main__":
    main()
