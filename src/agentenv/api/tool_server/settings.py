"""Settings of a tool server, frozen; read from a TOML file (docs/tool-server.md has one with every field)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from agentenv.config import Seconds, Settings, environment_value, explain
from agentenv.errors import ConfigError

Count = Annotated[int, Field(ge=1, le=1_000_000)]


class SecretSource(Settings):
    """Location of a secret's value: a file, or an environment variable. Never the settings themselves."""

    file: Path | None = None
    env: str | None = None

    @model_validator(mode="after")
    def _one(self) -> SecretSource:
        if (self.file is None) == (self.env is None):
            raise ValueError("give either file or env")
        return self


class ToolLimits(Settings):
    """Limits that replace the tool's own, where set."""

    timeout_s: Seconds | None = None
    concurrent: Count | None = None
    per_trajectory: Count | None = None
    per_group: Count | None = None


class AllowRule(Settings):
    """Hosts that may be reached.

    ``host``: a name (``docs.example.org``), all names below one (``*.example.org``), any name (``*``),
    an address or a network (``10.1.0.0/16``). ``ports`` None: 80 and 443, with ``headers`` 443 alone. Addresses that
    are not public (loopback, private, link-local) are reached only where a rule names the address or network.
    ``headers`` are sent along to this host only, with ``{name}`` replaced by that secret's value; over http only to a
    port named in ``ports`` (other than 443).
    """

    host: Annotated[str, Field(min_length=1, max_length=253)]
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] | None = None
    headers: dict[str, str] = Field(default_factory=dict)


class NetworkSettings(Settings):
    """Hosts that ``http_fetch``, ``web_extract`` and the browser may reach, and limits on what they return."""

    allow: tuple[AllowRule, ...] = ()
    max_bytes: Annotated[int, Field(ge=1024, le=256 * 1024 * 1024)] = 5 * 1024 * 1024
    """Maximum size of one page, decompressed; the rest is dropped and reported as missing."""
    timeout_s: Seconds = 20.0
    max_redirects: Annotated[int, Field(ge=0, le=20)] = 5
    user_agent: str = "Mozilla/5.0 (compatible; agentenv-tool-server)"


class SearchDialect(Settings):
    """How to query a search provider over HTTP, and where the results are in its JSON answer.

    ``results`` is a path of keys separated by dots. ``key_header`` is a header's text with ``{key}`` in it.
    """

    url: str
    method: Literal["GET", "POST"] = "GET"
    query_field: str = "q"
    count_field: str | None = None
    most: Count = 20
    """Maximum number of results in one answer."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Fields sent with every request."""
    key_header: tuple[str, str] | None = None
    results: str = "results"
    title: str = "title"
    link: str = "url"
    snippet: str = "content"


class SearchSettings(Settings):
    """The search provider. ``key`` names a secret; ``url`` replaces the provider's own (SearXNG has none)."""

    provider: Literal["searxng", "brave", "tavily", "custom"]
    url: str | None = None
    key: str | None = None
    dialect: SearchDialect | None = None

    @model_validator(mode="after")
    def _whole(self) -> SearchSettings:
        if (self.provider == "custom") != (self.dialect is not None):
            raise ValueError("dialect is required with provider='custom', and valid only there")
        if self.provider == "searxng" and self.url is None:
            raise ValueError("searxng is self-hosted: give its url")
        if self.provider in ("brave", "tavily") and self.key is None:
            raise ValueError(f"{self.provider} needs a key: name a secret")
        return self


class BrowserSettings(Settings):
    """``enabled`` False leaves the browser tools out. ``executable`` None: Chromium as found on PATH."""

    enabled: bool = True
    executable: Path | None = None
    sandbox: bool = True
    """Chromium's own sandbox, which does not work for root (and is off then). False: off for other users too."""
    max_contexts: Count = 16
    """Maximum number of trajectories with a page at once; others fail with an InfraError instead of waiting."""
    navigation_timeout_s: Seconds = 30.0


class CassetteSettings(Settings):
    """``record``: answers come from the group's cassette; missing ones are requested and recorded. ``replay``:
    missing ones are refused, and nothing is reached. ``off``: neither."""

    mode: Literal["off", "record", "replay"] = "off"
    directory: Path | None = None

    @model_validator(mode="after")
    def _somewhere(self) -> CassetteSettings:
        if self.mode != "off" and self.directory is None:
            raise ValueError(f"mode {self.mode!r} needs a directory")
        return self


class ToolServerSettings(Settings):
    """Settings of a whole tool server."""

    modules: tuple[str, ...] = ()
    """Python modules with additional tools: dotted names, or paths of files."""
    builtin_tools: bool = True
    """Serve the shipped tools (web, browser, http_fetch) as well."""
    secrets: dict[str, SecretSource] = Field(default_factory=dict)
    search: SearchSettings | None = None
    network: NetworkSettings = NetworkSettings()
    browser: BrowserSettings = BrowserSettings()
    cassettes: CassetteSettings = CassetteSettings()
    limits: dict[str, ToolLimits] = Field(default_factory=dict)
    """Limits by tool."""
    audit_log: Path | None = None
    max_result_bytes: Annotated[int, Field(ge=1024, le=16 * 1024 * 1024)] = 256 * 1024
    trajectory_idle_s: Seconds = 3600.0
    """The state of a trajectory is dropped when there was no request for it for this long."""

    @classmethod
    def from_file(cls, path: Path) -> ToolServerSettings:
        """Read a TOML file; its relative paths are relative to its directory. Raises: ConfigError."""
        try:
            read = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError("config", f"{path} cannot be read: {error}") from error
        try:
            settings = cls.model_validate(read)
        except ValidationError as error:
            raise explain(error, cls) from error
        return settings.below(path.resolve().parent)

    def below(self, directory: Path) -> ToolServerSettings:
        """A copy with every relative path taken from ``directory``."""

        def at(path: Path | None) -> Path | None:
            return None if path is None else directory / path

        secrets = {name: source.model_copy(update={"file": at(source.file)}) for name, source in self.secrets.items()}
        cassettes = self.cassettes.model_copy(update={"directory": at(self.cassettes.directory)})
        modules = tuple(str(directory / name) if name.endswith(".py") else name for name in self.modules)
        changed = {"secrets": secrets, "cassettes": cassettes, "modules": modules, "audit_log": at(self.audit_log)}
        return self.model_copy(update=changed)

    def secret_values(self) -> dict[str, str]:
        """Read every declared secret now. Raises ConfigError naming the one that cannot be read."""
        from agentenv.api.tool_server.secrets import read_secret

        found: dict[str, str] = {}
        for name, source in self.secrets.items():
            value: Any = read_secret(name, source.file) if source.file else environment_value(source.env or "")
            if not value:
                where = source.file or f"${source.env}"
                raise ConfigError(f"secrets.{name}", f"{where} is empty", next_step="put the value there")
            found[name] = value
        return found
