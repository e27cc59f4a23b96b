"""Which farm service to ask, and with which token: as given, from the environment, or the one of this machine."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from agentenv.config import environment_value, state_dir
from agentenv.errors import ConfigError
from agentenv.run_files import AlreadyRunningError, RunFile, running

logger = logging.getLogger(__name__)

Route = Literal["auto", "direct", "relay"]

_KIND: Final = "service"
_IN_FILE: Final = "file:"


@dataclass(frozen=True)
class FarmAccess:
    """A farm service's addresses, and the right to use it. ``run``: which, where the token is for several. ``renew``
    returns the token of now, where it lives for a short time; None: it is the one given."""

    urls: tuple[str, ...]
    token: str = field(repr=False)
    run: str = ""
    route: Route = "auto"
    renew: Callable[[], str | None] | None = field(default=None, repr=False, compare=False)


def farm_access(
    url: str | None = None,
    token: str | None = None,
    run: str | None = None,
    route: Route = "auto",
    *,
    run_here: str = "local",
) -> FarmAccess:
    """The farm at ``url`` (several addresses separated by commas; ``nomad://SERVICE``), else at
    ``$AGENTENV_FARM_URL``, else the service that this user runs on this machine. ``token``: itself or ``file:PATH``,
    else ``$AGENTENV_FARM_TOKEN``; for the service of this machine none is needed, and ``run_here`` is the run where
    none is named.

    Raises ConfigError when there is none, or no token for it.
    """
    url = url or environment_value("AGENTENV_FARM_URL")
    token = token or environment_value("AGENTENV_FARM_TOKEN")
    run = run or environment_value("AGENTENV_FARM_RUN") or ""
    if not url:
        here = next(iter(running(state_dir(), _KIND)), None)
        if here is None:
            raise ConfigError(
                "farm_url",
                "is missing, and no farm service runs on this machine",
                next_step="give its address, or start one: `agentenv farm serve`",
            )
        where = str(here["url"])
        return FarmAccess(
            (where,), str(here["token"]), run or run_name(run_here), route, lambda: announced_token(where)
        )
    if not token:
        raise ConfigError("farm_token", "is missing", next_step="give file:PATH of a token (agentenv farm token)")
    return FarmAccess(tuple(part.strip() for part in url.split(",")), token_of(token, "farm_token"), run, route)


def run_name(text: str) -> str:
    """A run's name made of any text: what may not be in one becomes ``-``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64] or "local"


def announced_token(url: str) -> str | None:
    """The token for this user's service at that address; None: there is none."""
    said = running(state_dir(), _KIND)
    return next((str(one["token"]) for one in said if one["url"] == url), None)


@contextmanager
def announced(name: str, url: str) -> Iterator[Callable[[str], None]]:
    """Tell other processes of this user where this service is, and let them use it, once the function yielded is called
    with a token; it replaces the token before. Of several services of one name on this machine the first is
    announced."""
    try:
        file = RunFile.open(state_dir(), _KIND, name)
    except AlreadyRunningError:
        yield lambda _: None
        return
    with file:
        yield lambda token: file.write({"url": url, "token": token})


def page_url(url: str, token: str) -> str:
    """The address of a farm's page, with a token. Browsers send what follows the # to nobody."""
    return f"{url.rstrip('/')}/#token={token}"


def token_of(given: str, field_name: str) -> str:
    """The token itself, or the content of ``file:PATH``, so that it need not be on a command line. A file that others
    may read is used, with a warning. Raises ConfigError."""
    if not given.startswith(_IN_FILE):
        return given
    path = Path(given.removeprefix(_IN_FILE))
    try:
        with path.open() as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                logger.warning("%s: everybody on this machine may read the token in it (chmod o-r)", path)
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field_name, f"{path} cannot be read: {error}") from error
