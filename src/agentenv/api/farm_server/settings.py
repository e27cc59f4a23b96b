"""Settings of a farm service, frozen; read from a TOML file, and read again while it runs."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tomllib
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Self

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from agentenv.config import ContainerSettings, NomadSettings, PoolSettings, Seconds, Settings, explain
from agentenv.deadlines import ACQUIRE_TIMEOUT_S
from agentenv.errors import ConfigError
from agentenv.image_placement.placement import DEFAULT_COPIES
from agentenv.slots.backends.registry import BackendName
from agentenv.slots.sharing import KIND_WEIGHTS, Share
from agentenv.wire.farm import RUN_PATTERN, RunShare
from agentenv.wire.leases import RunKind

Weight = Annotated[float, Field(gt=0, le=1e6)]
RunKey = Annotated[str, Field(max_length=128, pattern=rf"^{RUN_PATTERN}$")]
TeamKey = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class ShareSettings(Settings):
    """Shares of runs as far as ``runs`` does not say."""

    default: RunShare = RunShare()


class TeamShare(Settings):
    """What a team (the runs ``team/…``) is entitled to."""

    weight: Weight = 1.0
    """Its share of contested slots, relative to those of other teams, and of runs without one."""


class KindSettings(Settings):
    """Weights of the kinds of leases within each run, relative to each other."""

    train: Weight = KIND_WEIGHTS["train"]
    eval: Weight = KIND_WEIGHTS["eval"]
    interactive: Weight = KIND_WEIGHTS["interactive"]


class TokenSettings(Settings):
    """How the tokens of runs are verified."""

    key_files: Annotated[tuple[Path, ...], Field(min_length=1, max_length=8)] = (Path("farm.key"),)
    """Files with the keys that tokens are signed with, mode 0600. The first signs, all verify; the first is created
    if it does not exist. To replace a key, put the new one first, and remove the old one when the tokens it signed
    have expired."""
    denied: frozenset[str] = frozenset()
    """Ids (``jti``) of tokens that are no longer accepted."""


class AskLimits(Settings):
    """How fast one token may ask for slots; beyond that its requests are refused for a while."""

    asks_per_s: Annotated[float, Field(gt=0, le=1e6)] = 200.0
    """On average."""
    burst: Annotated[int, Field(ge=1, le=1_000_000)] = 2_000
    """Asks that may come at once after a pause."""


class LeaseLimits(Settings):
    """What one ask may be for; more is refused."""

    max_ttl_s: Annotated[float, Field(ge=1, le=86_400)] = 3_600.0
    """Longest time that a lease may last without being renewed: how long a client that dies holds its slots."""
    max_group_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Largest group, as a part of the farm at its largest: while a group gathers, slots are idle. One that fits into a
    container is always allowed."""


class PlainSettings(Settings):
    """Trajectories whose slots the farm holds itself (``POST /execute``)."""

    idle_s: Annotated[float, Field(ge=2, le=86_400)] = 600.0
    """A trajectory that has made no call for this long is released. Its container counts the time, also while the farm
    is away."""
    acquire_timeout_s: Seconds = ACQUIRE_TIMEOUT_S
    """How long a call waits for a slot before it is refused for now; asked again within 20 s it keeps its place."""
    calls_at_once: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Calls of one token that run or wait at once; beyond that they are refused for a while."""


class OpenPages(Settings):
    """Pages that need no token."""

    metrics: bool = False
    """``/metrics``. It names runs."""
    openapi: bool = False
    """``/openapi.json``."""


class ImageSettings(Settings):
    """Images that slots have as their root, fetched by the keepers of the nodes (docs/images.md)."""

    keeper_token_file: Path | None = None
    """File of the token that the keepers share. None: the farm has no keepers, and clients see to it themselves that
    images are where containers see them."""
    keeper_port: Annotated[int, Field(ge=1, le=65_535)] = 8643
    """Where the keeper of every node listens, at the address of the node's containers."""
    copies_per_image: Annotated[int, Field(ge=1, le=1_000)] = DEFAULT_COPIES
    """To how many nodes an image is fetched ahead, and at most at once. More get it only when it is wanted and all that
    have it are full."""


class E2BSettings(Settings):
    """E2B's API beside the farm's own (``agentenv farm serve --e2b``, docs/e2b.md)."""

    port: Annotated[int, Field(ge=0, le=65_535)] = 3000
    """Where it listens, at the address of the farm."""
    envd: Path | None = None
    """E2B's envd, which runs in its sandboxes. None: the one that ``agentenv farm e2b-build`` built."""
    templates: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")], str] = Field(
        default_factory=lambda: {"base": "debian:bookworm"}
    )
    """Images by the names that clients give (``base`` is what E2B's SDKs use without one)."""


def _naming(section: str) -> WrapValidator:
    """Its own checks name a field without its section, and ``limits`` is another section as well."""

    def named(given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(given)
        except ConfigError as error:
            message = error.message.removeprefix(f"{error.field}: ")
            raise ConfigError(f"{section}.{error.field}", message, next_step=error.next_step) from None

    return WrapValidator(named)


class FarmSettings(Settings):
    """Settings of a whole farm service."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")] = "default"
    """The farm's name. With the backend ``local``, the next service of the same name on this machine adopts its
    containers."""
    backend: BackendName = "local"
    """``local``: containers are processes of this machine. ``nomad``: allocations of a job. ``fake``: in this process,
    without isolation, for tests."""
    pool: Annotated[PoolSettings, _naming("pool")] = PoolSettings()
    """Number of containers, and how slots are leased."""
    containers: Annotated[ContainerSettings, _naming("containers")] = ContainerSettings()
    """Slots, isolation, network and limits of every container."""
    nomad: NomadSettings = NomadSettings(purge_job_on_shutdown=False)
    """With the backend ``nomad``: the cluster and the job. What is not given comes from Nomad's own ``NOMAD_*``
    variables. The job stays when the service ends, unless ``purge_job_on_shutdown`` is set."""
    unattended_after_s: Annotated[int, Field(ge=0, le=31_536_000)] = 3600
    """With the backend ``local``: a container that has no lease and has not been asked for anything for this long
    ends itself. 0: never."""
    shares: ShareSettings = ShareSettings()
    """What a run is entitled to as far as ``runs`` does not say."""
    runs: dict[RunKey, RunShare] = Field(default_factory=dict)
    """What each run is entitled to, by its name. What is not given is as in ``shares.default``."""
    teams: dict[TeamKey, TeamShare] = Field(default_factory=dict)
    """What each team is entitled to, by its name: slots are divided among teams, and then among each team's runs."""
    kinds: KindSettings = KindSettings()
    """How a run's own slots are divided among training, evaluation and interactive use."""
    reclaim_after_s: Seconds | None = None
    """When a run has waited this long within its guarantee, leases of runs above theirs are ended for it. None: it
    waits until slots become free."""
    relay_url: Annotated[str, Field(pattern=r"^(https?://[^/?#\s]+[^?#\s]*)?$")] = ""
    """Base URL of the relay (``agentenv farm relay``) for clients that cannot reach the containers; empty: none."""
    tokens: TokenSettings = TokenSettings()
    """Keys that the tokens of runs are signed with, and tokens that are revoked."""
    limits: AskLimits = AskLimits()
    """How fast one token may ask."""
    leases: LeaseLimits = LeaseLimits()
    """How long leases last, and how many are given at once."""
    plain: PlainSettings = PlainSettings()
    """Tools called over plain HTTP."""
    images: ImageSettings = ImageSettings()
    """Images of slots, and the nodes' keepers of them."""
    e2b: E2BSettings = E2BSettings()
    """E2B's API, where it is served."""
    audit_log: Path | None = None
    """A file that gets a JSON line for each decision (granted, refused, ended, minted, share changed)."""
    public: OpenPages = OpenPages()
    """Pages that need no token."""

    @model_validator(mode="before")
    @classmethod
    def _complete_runs(cls, given: Any) -> Any:
        match given:
            case {"runs": dict() as runs, "shares": {"default": dict() as default}}:
                whole = {name: {**default, **run} if isinstance(run, dict) else run for name, run in runs.items()}
                return {**given, "runs": whole}
        return given

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a TOML file; its relative paths are relative to its directory. Raises ConfigError, which names the
        field."""
        try:
            read = tomllib.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError("config", f"{path} cannot be read: {error}") from error
        if isinstance(nomad := read.get("nomad", {}), dict):
            read["nomad"] = {"purge_job_on_shutdown": False, **_from_environment(), **nomad}
        try:
            settings = cls.model_validate(read)
        except ValidationError as error:
            raise explain(error, cls) from None
        return settings.below(path.absolute().parent)

    def below(self, directory: Path) -> Self:
        """A copy with every relative path taken from ``directory``."""

        def moved(settings: Settings, *fields: str) -> dict[str, Path | None]:
            given = {name: getattr(settings, name) for name in fields}
            return {name: None if path is None else directory / path for name, path in given.items()}

        keys = tuple(directory / path for path in self.tokens.key_files)
        nomad = moved(self.nomad, "ca_cert", "client_cert", "client_key", "job_file")
        changed = {
            "tokens": self.tokens.model_copy(update={"key_files": keys}),
            "nomad": self.nomad.model_copy(update=nomad),
            "images": self.images.model_copy(update=moved(self.images, "keeper_token_file")),
            "e2b": self.e2b.model_copy(update=moved(self.e2b, "envd")),
            **moved(self, "audit_log"),
        }
        return self.model_copy(update=changed)

    @property
    def share_table(self) -> ShareTable:
        """The shares, for the queue."""
        runs = {name: share_of(share) for name, share in self.runs.items()}
        kinds: dict[RunKind, float] = {
            "train": self.kinds.train, "eval": self.kinds.eval, "interactive": self.kinds.interactive,
        }  # fmt: skip
        teams = {name: team.weight for name, team in self.teams.items()}
        return ShareTable(
            share_of(self.shares.default), MappingProxyType(runs), MappingProxyType(kinds), MappingProxyType(teams)
        )


def share_of(share: RunShare) -> Share:
    """A share as the queue has it."""
    return Share(weight=share.weight, guaranteed=share.guaranteed, cap=share.cap, paused=share.paused)


@dataclass(frozen=True)
class ShareTable:
    """Who is entitled to what: the arguments of :meth:`FairShare.set_shares`, in its order."""

    default: Share
    """Of runs that are not in ``runs``."""
    runs: Mapping[str, Share]
    kinds: Mapping[RunKind, float]
    teams: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Their weights."""

    def of(self, run: str) -> Share:
        """The share of a run."""
        return self.runs.get(run, self.default)

    def changed(self, runs: Mapping[str, RunShare]) -> ShareTable:
        """A table with other shares for these runs."""
        more = {name: share_of(share) for name, share in runs.items()}
        return ShareTable(self.default, MappingProxyType({**self.runs, **more}), self.kinds, self.teams)


# -- read again while running ---------------------------------------------------------------------------

WHILE_RUNNING: Final = frozenset(
    {"shares", "runs", "teams", "kinds", "reclaim_after_s", "limits", "leases", "tokens.denied"}
)
"""What may change while the service runs. Anything else needs a restart."""


@dataclass(frozen=True)
class Reloaded:
    """What has become of a file that was read again.

    ``settings``: those that apply from now on. ``changed``: the fields that have another value than before.
    ``needs_restart``: fields that have another value in the file, which applies after a restart. ``error``: why the
    file could not be used; all is as before then.
    """

    settings: FarmSettings
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    error: ConfigError | None = None


def merged(running: FarmSettings, read: FarmSettings) -> Reloaded:
    """``running`` with what may change taken from ``read``."""
    differing = {name for name in FarmSettings.model_fields if getattr(running, name) != getattr(read, name)}
    if "tokens" in differing:
        differing.remove("tokens")
        differing |= {
            f"tokens.{name}"
            for name in TokenSettings.model_fields
            if getattr(running.tokens, name) != getattr(read.tokens, name)
        }
    changed = differing & WHILE_RUNNING
    update: dict[str, Any] = {name: getattr(read, name) for name in changed if "." not in name}
    if "tokens.denied" in changed:
        update["tokens"] = running.tokens.model_copy(update={"denied": read.tokens.denied})
    settings = running.model_copy(update=update)
    return Reloaded(settings, tuple(sorted(changed)), tuple(sorted(differing - changed)))


class SettingsFile:
    """A settings file, and the settings that apply. Replace the file in one step (``mv``): a half-written one may be
    valid.

    Opening raises ConfigError; later a wrong file is reported, and changes nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = self._signature()
        self.settings = FarmSettings.from_file(path)
        self._asked = asyncio.Event()

    def look(self, *, force: bool = False) -> Reloaded | None:
        """Read the file if it was changed (``force``: in any case), and apply what may change; None if it was not
        read."""
        seen = self._signature()
        if seen == self._seen and not force:
            return None
        self._seen = seen
        try:
            reloaded = merged(self.settings, FarmSettings.from_file(self.path))
        except ConfigError as error:
            return Reloaded(self.settings, error=error)
        self.settings = reloaded.settings
        return reloaded

    def ask(self) -> None:
        """Read the file again now (on SIGHUP), for :meth:`reloads`."""
        self._asked.set()

    async def reloads(self, every_s: float = 2.0) -> AsyncGenerator[Reloaded, None]:
        """Each reading of the file: when it was changed, within ``every_s``, and after :meth:`ask`."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._asked.wait()
            force = self._asked.is_set()
            self._asked.clear()
            if (reloaded := await asyncio.to_thread(self.look, force=force)) is not None:
                yield reloaded

    def _signature(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self.path)  # noqa: PTH116 (the target of a link, as Kubernetes and Nomad replace it)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _from_environment() -> dict[str, Any]:
    """What Nomad's own variables say."""
    found = NomadSettings.from_environment()
    return {name: getattr(found, name) for name in found.model_fields_set}
