"""The services of a compose file beside the agent's: what is started in each, when, and by which names they are known.

All are in one slot, and so in one network: two cannot listen at the same port, and none is kept apart from another by
networks of its own. What relies on that is refused by name.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, Literal, TypeVar, get_args

from agentenv.tasks.harbor.compose import Compose, Service
from agentenv.tasks.harbor.task import Condition, Group, Healthcheck, SideService
from agentenv.wire.roots import MAX_HOSTS, MAX_SERVICES, is_host, is_service

_IN_SLOT: Final = frozenset({"", "default", "bridge"})
"""Values of ``network_mode`` that mean the network of all; and ``service:NAME``."""
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:us|ms|s|m|h))+")
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)")
_SECONDS_OF: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_CHECK: Final = Healthcheck(command="", interval_s=30.0, timeout_s=30.0)
"""Docker's defaults."""
_RESTARTS: Final[Mapping[str, Literal["no", "on-failure", "always"]]] = {
    "": "no",
    "no": "no",
    "false": "no",
    "on-failure": "on-failure",
    "always": "always",
    "unless-stopped": "always",
}
_INITS: Final = frozenset({"/sbin/init", "/usr/sbin/init", "/lib/systemd/systemd", "/usr/lib/systemd/systemd"})
_Number = TypeVar("_Number", int, float)


def read_group(compose: Compose) -> Group:
    """The services beside the agent's. Raises ConfigError naming the task, the file and the field."""
    everything = {each.name: each for each in (compose.main, *compose.beside)}
    if len(compose.beside) > MAX_SERVICES:
        raise compose.main.error("", f"has {len(compose.beside)} services beside it", f"at most {MAX_SERVICES}")
    _check_networks(everything.values())
    _check_ports(everything.values())
    _check_shared_files(everything.values())
    after = {name: _after(each, everything) for name, each in everything.items()}
    if compose.main.name not in after or not compose.beside:
        return Group()
    order = _order(compose, after)
    found = {each.name: _side(each, after[each.name], compose.main.name) for each in compose.beside}
    for waiting, conditions in after.items():
        for name, condition in conditions.items():
            if condition == "service_healthy" and name in found and found[name].healthcheck is None:
                problem = f"waits until {name} is healthy, which has no healthcheck here"
                raise everything[waiting].error("depends_on", problem, f"write it into services.{name}.healthcheck")
    hosts = dict.fromkeys(name for each in everything.values() for name in _names(each))
    if len(hosts) > MAX_HOSTS:
        raise compose.main.error("", f"and its services have {len(hosts)} names", f"at most {MAX_HOSTS}")
    started = tuple(found[name] for name in order if name in found)
    return Group(started, after[compose.main.name], tuple(hosts))


def total(own: _Number | None, others: Iterable[_Number | None]) -> _Number | None:
    """A limit of all together: that of the agent's machine, and those that its services have. None: there is none."""
    return None if own is None else own + sum(other for other in others if other is not None)


def _side(service: Service, after: Mapping[str, Condition], main: str) -> SideService:
    mode = service.text("network_mode")
    if mode not in _IN_SLOT and not mode.startswith("service:"):
        raise service.error("network_mode", f"got {mode!r}", "allowed: bridge, service:NAME: services share a network")
    entrypoint, command = _words(service, "entrypoint"), _words(service, "command")
    if {*(entrypoint or ())[:1], *(command or ())[:1]} & _INITS:
        raise service.error(
            "command", "is an init system (systemd), which slots cannot run", "start the program itself"
        )
    restart = service.text("restart").partition(":")[0] if service.raw.get("restart") is not False else ""
    if restart not in _RESTARTS:
        raise service.error("restart", f"got {restart!r}", f"allowed: {', '.join(filter(None, _RESTARTS))}")
    return SideService(
        name=service.name,
        image=service.image(),
        entrypoint=entrypoint,
        command=command,
        restart=_RESTARTS[restart],
        user=service.text("user"),
        workdir=service.workdir(),
        env=service.env(),
        volumes=service.volumes(),
        mounts=service.mounts(),
        healthcheck=_healthcheck(service),
        after={name: condition for name, condition in after.items() if name != main},
    )


def _words(service: Service, field: str) -> tuple[str, ...] | None:
    """An argv, also of a text, which has the words of a shell but is given to none."""
    value = service.raw.get(field)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return tuple(shlex.split(service.filled(field, value)))
        except ValueError as error:
            raise service.error(field, f"got {value[:100]!r}: {error}") from error
    if not isinstance(value, list) or not all(isinstance(word, (str, int, float)) for word in value):
        raise service.error(field, f"got {str(value)[:100]}", "allowed: text, or a list of texts")
    return tuple(service.filled(field, str(word)) for word in value)


def _healthcheck(service: Service) -> Healthcheck | None:
    table = service.raw.get("healthcheck")
    if table is None:
        return None
    if not isinstance(table, dict):
        raise service.error("healthcheck", f"got {table!r}", "allowed: a table")
    test = table.get("test")
    if table.get("disable") or test in (["NONE"], "NONE"):
        return None
    if isinstance(test, str):
        command = test
    elif isinstance(test, list) and len(test) > 1 and test[0] in ("CMD", "CMD-SHELL"):
        command = str(test[1]) if test[0] == "CMD-SHELL" else shlex.join(map(str, test[1:]))
    else:
        raise service.error("healthcheck.test", f"got {test!r}", "allowed: text, or [CMD, …], [CMD-SHELL, …], [NONE]")
    retries = table.get("retries", _CHECK.retries)
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 1:
        raise service.error("healthcheck.retries", f"got {retries!r}", "allowed: 1 and more")
    return Healthcheck(
        service.filled("healthcheck.test", command),
        interval_s=_seconds(service, table, "interval", _CHECK.interval_s),
        timeout_s=_seconds(service, table, "timeout", _CHECK.timeout_s),
        start_period_s=_seconds(service, table, "start_period", _CHECK.start_period_s),
        start_interval_s=_seconds(service, table, "start_interval", _CHECK.start_interval_s),
        retries=retries,
    )


def _seconds(service: Service, table: Mapping[str, Any], name: str, usual_s: float) -> float:
    value = table.get(name)
    if value is None:
        return usual_s
    if isinstance(value, str) and _DURATION.fullmatch(value):
        return sum(float(number) * _SECONDS_OF[unit] for number, unit in _DURATION_PART.findall(value)) or usual_s
    raise service.error(f"healthcheck.{name}", f"got {value!r}", "allowed: 5s, 1m30s and the like")


def _after(service: Service, everything: Mapping[str, Service]) -> dict[str, Condition]:
    """What it waits for."""
    given = service.raw.get("depends_on") or {}
    table = dict.fromkeys(given) if isinstance(given, list) else given
    if not isinstance(table, dict):
        raise service.error("depends_on", f"got {given!r}", "allowed: names of services, or a table of them")
    found: dict[str, Condition] = {}
    for name, how in table.items():
        condition = (how or {}).get("condition", "service_started") if isinstance(how or {}, dict) else how
        if condition not in get_args(Condition):
            raise service.error("depends_on", f"got {condition!r}", f"allowed: {', '.join(get_args(Condition))}")
        if name in everything:
            found[name] = condition
        elif not (isinstance(how, dict) and how.get("required") is False):
            raise service.error("depends_on", f"names {name}, and there is no such service")
    return found


def _order(compose: Compose, after: Mapping[str, Mapping[str, Condition]]) -> Sequence[str]:
    """The agent's machine is there from the beginning, so a service that waits until it is started waits for nothing;
    it never ends."""
    main = compose.main.name
    for each in compose.beside:
        if after[each.name].get(main, "service_started") != "service_started":
            raise each.error("depends_on", f"waits for {main}, in which the agent works", "allowed: service_started")
    graph = {name: [other for other in waits if other != main] for name, waits in after.items()}
    try:
        return tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        problem = f"services wait for each other: {', '.join(error.args[1])}"
        raise compose.main.error("depends_on", problem) from error


def _check_networks(services: Iterable[Service]) -> None:
    """All have to be in the same networks, and at no addresses of their own."""
    first: tuple[Service, frozenset[str]] | None = None
    for each in services:
        given = each.raw.get("networks") or ["default"]
        if isinstance(given, dict):
            for name, options in given.items():
                if fixed := sorted((options or {}).keys() & {"ipv4_address", "ipv6_address", "mac_address"}):
                    problem = "services have no addresses of their own: all are at 127.0.0.1"
                    raise each.error(f"networks.{name}.{fixed[0]}", problem, "use the service's name")
        elif not isinstance(given, list):
            raise each.error("networks", f"got {given!r}", "allowed: names of networks, or a table of them")
        if each.text("network_mode") and not each.raw.get("networks"):
            continue
        if first is not None and first[1] != frozenset(given):
            problem = f"separates it from {first[0].name}: services of a task share one network"
            raise each.error("networks", problem, "leave networks out")
        first = first or (each, frozenset(given))


def _check_ports(services: Iterable[Service]) -> None:
    """None listens where another does, as far as they say."""
    taken: dict[str, str] = {}
    for each in services:
        for port in sorted(_ports(each)):
            if port in taken:
                problem = f"{taken[port]} has port {port} as well: services of a task share one network"
                raise each.error("ports" if each.raw.get("ports") else "expose", problem, "give them different ports")
            taken[port] = each.name


def _ports(service: Service) -> set[str]:
    """Its ports inside; where they are to be seen outside means nothing here."""
    found = set()
    for given in (*(service.raw.get("expose") or ()), *(service.raw.get("ports") or ())):
        text = str(given.get("target")) if isinstance(given, dict) else service.filled("ports", str(given))
        found.add(text.rpartition(":")[2].partition("/")[0])
    return found


def _check_shared_files(services: Iterable[Service]) -> None:
    """Files of the task are copied to each that mounts them, so none may change what another has."""
    mounted: dict[str, tuple[str, bool]] = {}
    for each in services:
        for source, read_only in each.shared_mounts().items():
            other, kept = mounted.setdefault(source, (each.name, read_only))
            if other != each.name and not (kept and read_only):
                problem = f"{source} is mounted in {other} as well, and each would have a copy of its own"
                raise each.error("volumes", problem, "share a named volume, or mount both :ro")


def _names(service: Service) -> Iterable[str]:
    """By which it is known in its network."""
    if not is_service(service.name):
        raise service.error("", "is not a valid name", "allowed: letters, digits, _ . -")
    networks = service.raw.get("networks")
    tables = networks.values() if isinstance(networks, dict) else ()
    found = {
        "": [service.name],
        "hostname": [service.text("hostname")],
        "container_name": [service.text("container_name")],
        "networks": [str(alias) for options in tables for alias in (options or {}).get("aliases") or ()],
        "links": [posixpath.basename(str(link).rpartition(":")[2]) for link in service.raw.get("links") or ()],
    }
    for field, names in found.items():
        for name in filter(None, names):
            if not is_host(name):
                raise service.error(field, f"got {name[:100]!r}", "allowed: host names: letters, digits, _ . -")
            yield name
