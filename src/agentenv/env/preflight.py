"""What is checked before the first rollout, because it would fail every one alike: atropos' own settings, which it
takes as they are, and the model's server. A command sends it one request as rollouts do, for a single token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_origin
from urllib.parse import urlsplit

from agentenv.agent.generate import no_items
from agentenv.agent.hooks import (
    WITHOUT_ARGUMENTS,
    Hooks,
    call_hook,
    check_not_overridden,
    check_signature,
    check_signatures,
    expected,
    misspelt,
)
from agentenv.agent.jsonable import item_id
from agentenv.agent.models.openai import LIMITS
from agentenv.agent.program import AgentProgram
from agentenv.agent.protocols import ToolDefinition
from agentenv.agent.results import one_line
from agentenv.agent.settings import AgentSettings
from agentenv.deadlines import scaled
from agentenv.env.model_servers import address_of, printed
from agentenv.errors import ConfigError, HookError, ModelServerError
from agentenv.tools.schema import closest
from agentenv.wire.roots import RootSpec

logger = logging.getLogger(__name__)

LEAST: Final[Mapping[str, float]] = {
    "group_size": 1, "total_steps": 1, "max_num_workers": 1, "max_num_workers_per_node": 1, "max_eval_workers": 1,
    "batch_size": 1, "max_token_length": 1, "worker_timeout": 0.001,
}  # fmt: skip
"""atropos' settings of which a lower value does nothing, waits for ever or ends in an error about something else."""
OPEN: Final = {
    "total_steps": "the trainer's",
    "batch_size": "the trainer's",
    "max_num_workers": "of each server",
    "worker_timeout": "none",
}
"""Those of them that may be -1, and what that means."""
LEAST_OF_SERVER: Final = {"num_max_requests_at_once": 1, "num_requests_for_eval": 1, "timeout": 1}

PLACES: Final = {
    "runs_dir": "run",
    "data_path_to_save_groups": "groups",
    "rollouts_path": "records",
    "data_dir_to_save_evals": "metrics",
}
LEAST_FREE_BYTES: Final = 100 * 2**20
"""Less is refused by a dry run: the records of a few hundred rollouts."""

PROBE_LIMIT_S = scaled(60.0)
"""A server may have a queue, or load its weights: without an answer in this time, rollouts find out."""
MODELS_LIMIT_S = scaled(5.0)
MOST_NAMED = 8
NO_SUCH_ROUTE = frozenset({404, 405, 501})
"""What servers, of models or of anything else, answer to a POST where they have nothing."""
NO_TOOLS = "tool"
"""In the text of every server known to refuse tools."""


def check_numbers(config: Any) -> None:
    """Raises: ConfigError for a setting of atropos with which nothing can run."""
    for name, least in LEAST.items():
        value = getattr(config, name)
        if value < least and not (name in OPEN and value == -1):
            other = f", or -1 ({OPEN[name]})" if name in OPEN else ""
            allowed = "more than 0" if least < 1 else f"{least:g} or more"
            raise ConfigError(name, f"got {value}", next_step=f"allowed: {allowed}{other}")


def check_servers(servers: Sequence[Any]) -> None:
    """Raises: ConfigError for a base URL that nothing can be sent to, and for limits that let nothing through."""
    for server in servers:
        for name, least in LEAST_OF_SERVER.items():
            if (value := getattr(server, name, least)) < least:
                raise ConfigError(f"openai.{name}", f"got {value}", next_step=f"allowed: {least} or more")
        url = getattr(server, "base_url", None)
        if url is None:
            continue
        try:
            address = urlsplit(url)
            good = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        except ValueError:
            good = False
        if not good:
            spelt = f"http://{url}" if url and "://" not in url else "http(s)://HOST:PORT/v1"
            problem = f"{url!r} is no http(s) address" if url else "is empty"
            raise ConfigError("openai.base_url", problem, next_step=f"set it, such as {spelt}")


def check_hooks(env: object, base: type) -> None:
    """Raises: HookError when a hook of ``base``, the class of all environments, is missing in this one, could not be
    called, or would never be called. What resembles a hook is warned about."""
    own: Any = type(env)
    general: Any = base
    meant = misspelt(own, base)
    if own.score_trajectory is general.score_trajectory and (
        own.verify_and_score_trajectory is general.verify_and_score_trajectory
    ):
        hint = "; ".join(f"did you mean {hook} by {name}?" for name, hook in meant.items())
        missing = "has neither score_trajectory nor verify_and_score_trajectory"
        raise HookError(own.__name__, missing, next_step=hint or "write one of them")
    for name, hook in meant.items():
        logger.warning("%s.%s is no hook, so nothing calls it: did you mean %s?", own.__name__, name, hook)
    instead = "write setup_trajectory_workspace, verify_and_score_trajectory or collect_trajectories instead"
    check_not_overridden(own, base, "collect_trajectory", instead)
    check_signatures(env)
    for name in WITHOUT_ARGUMENTS:
        check_signature(env, name, ())


def is_typed(kind: type, base: type) -> bool:
    """Whether an environment is written as ``AgentEnv[Config]``, itself or by one of its bases."""
    bases = (each for parent in kind.__mro__ for each in vars(parent).get("__orig_bases__", ()))
    return any(get_origin(each) is base for each in bases)


def warn_of_queueing(servers: Sequence[Any], group_size: int) -> None:
    """Warn when a group's members have to wait for each other at the model's server."""
    if sum(server.num_max_requests_at_once for server in servers) < group_size:
        logger.warning(
            "the model's server accepts fewer requests at once (num_max_requests_at_once) than a group has members "
            "(group_size=%d): their turns wait for each other",
            group_size,
        )


async def first_item(
    hooks: Hooks, item: Any, root_of: Callable[[Any], Awaitable[RootSpec]] | None
) -> list[tuple[str, str]]:
    """Rows about an item, for which the hooks have run that come before its slot; its image is there then.

    Raises: TaskError for a hook, or for no item; ConfigError and InfraError for the image.
    """
    if item is None:
        raise no_items()
    task = expected("build_task", await call_hook("build_task", hooks.build_task, item), str)
    expected("build_agent_config", await call_hook("build_agent_config", hooks.build_agent_config, item), AgentSettings)
    image = await call_hook("task_image", hooks.task_image, item)
    if image is not None and root_of is not None:
        await root_of(image)
    program = await call_hook("agent_program", hooks.agent_program, item)
    agent = "built-in loop" if program is None else expected("agent_program", program, AgentProgram).title
    rows = [("item", item_id(item)), ("task", one_line(task)), ("image", "none" if image is None else str(image))]
    return [*rows, ("agent", agent)]


def places(config: Any, *, groups_in_run: bool = False) -> list[tuple[str, str]]:
    """Rows about the directories that results are written to; ``groups_in_run``: that of the groups is the run's.
    Raises: ConfigError when one cannot be, or is full."""
    rows = []
    for name in PLACES:
        if not (path := getattr(config, name)) or (groups_in_run and name == "data_path_to_save_groups"):
            continue
        place = Path(path).absolute()
        directory = next(each for each in (place, *place.parents) if each.is_dir())
        free_bytes = shutil.disk_usage(directory).free
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(name, f"{directory} cannot be written", next_step="name another place")
        if free_bytes < LEAST_FREE_BYTES:
            raise ConfigError(name, f"{directory} has {free_bytes >> 20} MiB left", next_step="make room")
        rows.append((PLACES[name], f"{path} ({free_bytes / 2**30:.1f} GiB free)"))
    return rows


async def probe(servers: Sequence[Any], tools: Sequence[ToolDefinition], sampling: Mapping[str, Any]) -> None:
    """Send each server one request as rollouts do. ``servers``: of atropos, with ``chat_completion``.

    Raises: ConfigError when one refuses it for a reason that would hold for every rollout: the key, the route, the
    model's name, the tools, the sampling. A server that fails or is away is left to the rollouts, which retry.
    """
    different = {(address_of(server), server.config.model_name, server.config.api_key): server for server in servers}
    await asyncio.gather(*(_probe(server, tools, sampling) for server in different.values()))


async def _probe(server: Any, tools: Sequence[ToolDefinition], sampling: Mapping[str, Any]) -> None:
    request = {**sampling, "messages": [{"role": "user", "content": "Answer with: ok"}], "n": 1}
    if tools:
        request["tools"] = list(tools)
    try:
        async with asyncio.timeout(PROBE_LIMIT_S):
            refusal = await _refusal(server, {**request, "max_tokens": 1})
            if refusal is not None and any(name in str(refusal) for name in LIMITS):
                refusal = await _refusal(server, request)  # models that reason accept no limit of one token
    except TimeoutError:
        logger.warning("the model's server at %s has not answered for %g s", printed(address_of(server)), PROBE_LIMIT_S)
        return
    if refusal is not None:
        raise await _explained(server, refusal, with_tools=bool(tools))


async def _refusal(server: Any, request: dict[str, Any]) -> Exception | None:
    """What the server answers if it refuses this request; None for everything that may pass."""
    try:
        await server.chat_completion(**request)
    except ModelServerError:
        return None
    except AttributeError:  # the openai client's result for anything but JSON is text
        return ConfigError("openai.base_url", f"what answers at {printed(address_of(server))} is not a model's server")
    except Exception as error:  # the openai client's, or that of an environment's own server
        status = getattr(error, "status_code", None)
        final = isinstance(status, int) and (400 <= status < 500 or status in NO_SUCH_ROUTE)
        return error if (final and status not in (408, 409, 425, 429)) or "--jinja" in str(error) else None
    return None


async def _explained(server: Any, refusal: Exception, *, with_tools: bool) -> ConfigError:
    if isinstance(refusal, ConfigError):
        return refusal
    url, name, status = address_of(server) or "", server.config.model_name, getattr(refusal, "status_code", 0)
    answer, place = f"HTTP {status}: {_words(refusal)}", printed(url)
    if status in (401, 403, 407):
        return ConfigError(
            "openai.api_key",
            f"the model's server at {place} refuses it ({answer})",
            next_step="set --openai.api_key, or OPENAI_API_KEY, to one that may use this model",
        )
    names = await _models(server, url)
    if names and name not in names and (status == 404 or name in str(refusal)):
        near = closest(name, names)
        others = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
        return ConfigError(
            "openai.model_name",
            f"the server at {place} has no model {name!r}",
            next_step=f"did you mean {near!r}? it has: {others}" if near else f"it has: {others}",
        )
    if with_tools and NO_TOOLS in str(refusal).lower():
        return ConfigError(
            "openai.base_url",
            f"the model's server at {place} refuses tools ({answer})",
            next_step="start it with --enable-auto-tool-choice --tool-call-parser NAME (vLLM), --tool-call-parser NAME "
            "(SGLang) or --jinja (llama.cpp), or use a model with tools",
        )
    if status in NO_SUCH_ROUTE and names is None:
        return await _no_route(server, url, answer)
    return ConfigError(
        "openai.base_url" if status in NO_SUCH_ROUTE else "openai.model_name",
        f"the model's server at {place} refuses a request for {name!r} ({answer})",
        next_step="every rollout would be refused alike: check the model's name, the sampling and extra_body",
    )


async def _no_route(server: Any, url: str, answer: str) -> ConfigError:
    bare = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    found = None
    for other in (bare, f"{bare}/v1"):
        if other != url.rstrip("/") and await _models(server, other) is not None:
            found = other
            break
    return ConfigError(
        "openai.base_url",
        f"there is no {printed(url).rstrip('/')}/chat/completions ({answer})",
        next_step=f"did you mean {printed(found)}?"
        if found
        else "set the address up to /chat/completions, most often with /v1",
    )


async def _models(server: Any, url: str) -> list[str] | None:
    """The names of the models that are served at this address; None if it does not tell."""
    client = getattr(server, "openai", None)
    if client is None:
        return None
    try:
        async with asyncio.timeout(MODELS_LIMIT_S):
            page = await client.with_options(base_url=url, max_retries=0).models.list()
        return sorted(str(model.id) for model in page.data)
    except Exception:  # it is only for the hint: whatever it is, there is none
        return None


def _words(refusal: Exception) -> str:
    """What the server wrote, in one short line."""
    body = getattr(refusal, "body", None)
    message = body.get("message") if isinstance(body, dict) else None
    return " ".join((message if isinstance(message, str) else str(refusal)).split())[:300]
