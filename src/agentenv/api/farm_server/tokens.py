"""Tokens of runs: what the bearer may ask a farm for, signed by the farm.

A token is a JWT (HS256). Its claims: ``sub`` (a run's name, ``team/*`` or ``*``), ``scope``, ``cap`` (optional),
``iat``, ``exp`` and ``jti``, by which it can be denied; and ``made_by``, the tokens by whose right it was made, with
their caps. The farm stores no tokens, only the keys they are signed with.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Self

import jwt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentenv.errors import ConfigError, UnauthorizedError
from agentenv.wire.farm import LONGEST_TOKEN_S, Scope, TokenRun
from agentenv.wire.leases import MAX_TOKENS, TokenTag

_ALGORITHM: Final = "HS256"
_LEAST_KEY_CHARACTERS: Final = 32
"""HS256 is as strong as its key up to 256 bits."""
_MAX_TOKEN_CHARACTERS: Final = 2_048
_FIELD: Final = "farm_token"
"""The setting of clients that holds the token: errors name it."""
_NEW: Final = "get a new one from the farm's operators (agentenv farm token)"


@dataclass(frozen=True)
class Right:
    """What a token allows. ``run``: a run's name, ``team/*`` (every run below ``team/``) or ``*`` (every run).

    ``cap``: the most slots that may be held at once by this token and those that it makes (None: as many as its runs
    may). ``jti``: the token's id. ``ends_unix_s``: when it expires. ``made_by``: the token that it was made by, and
    those that that was made by.
    """

    run: str
    scope: Scope
    cap: int | None
    jti: str
    ends_unix_s: float = math.inf
    made_by: tuple[TokenTag, ...] = ()

    @property
    def tokens(self) -> tuple[TokenTag, ...]:
        """Itself, and those that it was made by: what is done by it is done by all of them."""
        return (TokenTag(id=self.jti, cap=self.cap), *self.made_by)

    def revoked(self, denied: Collection[str]) -> UnauthorizedError | None:
        """The refusal of a token that was revoked, or that was made by one; None: it was not."""
        ids = [token.id for token in self.tokens if token.id in denied]
        if not ids:
            return None
        why = "" if ids[0] == self.jti else f": {ids[0]}, by whose right it was made, was"
        return UnauthorizedError(_FIELD, f"the token ({self.jti}) was revoked{why}", next_step=_NEW)

    def expired(self, now_unix_s: float) -> UnauthorizedError | None:
        """The refusal of a token that has expired; None: it has not."""
        return _expired() if now_unix_s >= self.ends_unix_s else None

    def covers(self, run: str) -> bool:
        """Whether it is for this run, or for every run of ``run`` if that is ``team/*`` or ``*``. ``team/*`` covers
        neither ``team`` nor ``teams/a``."""
        if self.run == "*":
            return run != ""
        if self.run.endswith("/*"):
            return run.startswith(self.run[:-1]) and len(run) >= len(self.run)
        return run == self.run

    @property
    def only_run(self) -> str:
        """The run, if it is for exactly one; else empty."""
        return "" if self.run.endswith("*") else self.run


class _Claims(BaseModel):
    """Other claims are ignored, so that a later release may add some."""

    model_config = ConfigDict(frozen=True, strict=True)

    sub: TokenRun
    scope: Scope
    cap: Annotated[int, Field(ge=0)] | None = None
    jti: Annotated[str, Field(min_length=1, max_length=100)]
    exp: int
    made_by: Annotated[tuple[TokenTag, ...], Field(max_length=MAX_TOKENS - 1, strict=False)] = ()


class TokenKeys:
    """The keys by which tokens are signed and verified: the first signs, all verify.

    To replace a key, put the new one first, and remove the old one when the tokens it signed have expired.

    Raises ConfigError for a key that is too short, or for none.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        if not keys or any(len(key) < _LEAST_KEY_CHARACTERS for key in keys):
            raise ConfigError("tokens.key_files", f"every key needs at least {_LEAST_KEY_CHARACTERS} characters")
        self._keys: Mapping[str, bytes] = MappingProxyType({_key_id(key): key.encode() for key in keys})
        self._signing = _key_id(keys[0])

    @classmethod
    def read(cls, paths: Sequence[Path], *, create: bool = False) -> Self:
        """The keys in these files. ``create``: the first file is created with a new key if it does not exist, readable
        by its owner only. A farm does that; a token that is signed with a key of no farm would be refused by all.

        Raises ConfigError when a file cannot be read or created, is readable by others, or holds no usable key.
        """
        if paths and create:
            _create(paths[0])
        return cls([_read(path) for path in paths])

    def mint(
        self, run: str, scope: Scope, *, cap: int | None = None, expires_s: float, maker: Right | None = None
    ) -> str:
        """A new token for ``run`` (or ``team/*``, or ``*``), valid for ``expires_s`` from now, and no longer than the
        token of its ``maker``.

        Raises ConfigError, which names the argument that is out of range.
        """
        if not 0 < expires_s <= LONGEST_TOKEN_S:
            raise ConfigError("expires_s", f"must be above 0 and at most {LONGEST_TOKEN_S:.0f} (got {expires_s:g})")
        now_s = time.time()
        try:
            claims = _Claims(
                sub=run,
                scope=scope,
                cap=cap,
                jti=secrets.token_hex(8),
                exp=int(min(now_s + expires_s + 1, math.inf if maker is None else maker.ends_unix_s)),
                made_by=() if maker is None else maker.tokens,
            )
        except ValidationError as error:
            first = error.errors()[0]
            name = "run" if first["loc"] == ("sub",) else str(first["loc"][0])
            raise ConfigError(name, f"{first['msg']} (got {first['input']!r})") from None
        timed = {**claims.model_dump(exclude_defaults=True), "iat": int(now_s)}
        return jwt.encode(timed, self._keys[self._signing], algorithm=_ALGORITHM, headers={"kid": self._signing})

    def verify(self, token: str, *, denied: Collection[str] = ()) -> Right:
        """The right that a token gives. ``denied``: the ids (``jti``) of tokens that are no longer accepted, nor are
        those that they made.

        Raises UnauthorizedError, which says what is wrong with it, and what to do.
        """
        claims = self._claims(token)
        right = Right(claims.sub, claims.scope, claims.cap, claims.jti, claims.exp, claims.made_by)
        if (revoked := right.revoked(denied)) is not None:
            raise revoked
        return right

    def _claims(self, token: str) -> _Claims:
        if not token:
            how = "send the header Authorization: Bearer TOKEN, with a token of agentenv farm token"
            raise UnauthorizedError(_FIELD, "the token is missing", next_step=how)
        if len(token) > _MAX_TOKEN_CHARACTERS or not token.isascii():
            raise _garbled()
        try:
            header = jwt.get_unverified_header(token)
            key = self._keys.get(str(header.get("kid")))
            if key is None:
                raise UnauthorizedError(
                    _FIELD, "the token is signed with a key that this farm does not accept (any more)", next_step=_NEW
                )
            # The algorithm is ours, not the one that the token names.
            options: jwt.types.Options = {"require": ["exp", "sub", "jti"], "verify_iat": False}
            return _Claims.model_validate(jwt.decode(token, key, algorithms=[_ALGORITHM], options=options))
        except jwt.ExpiredSignatureError:
            raise _expired() from None
        except (jwt.PyJWTError, ValueError, RecursionError):  # a pydantic ValidationError is a ValueError
            raise _garbled() from None

    def __repr__(self) -> str:
        return f"<TokenKeys {', '.join(self._keys)}>"


def bearer_token(authorization: str | None) -> str:
    """The token of an ``Authorization`` header; empty without one."""
    kind, _, given = (authorization or "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else ""


def _expired() -> UnauthorizedError:
    return UnauthorizedError(_FIELD, "the token has expired", next_step=_NEW)


def _garbled() -> UnauthorizedError:
    return UnauthorizedError(
        _FIELD, "this is not a token of the farm, or it was changed", next_step=f"copy it again as a whole, or {_NEW}"
    )


def _key_id(key: str) -> str:
    """A name for the key, which every token shows."""
    return hashlib.sha256(b"agentenv key id\0" + key.encode()).hexdigest()[:16]


def _create(path: Path) -> None:
    """Create the file with a new key, unless it exists."""
    if path.exists():
        return
    # It gets its name when it is complete: another process may look for it at this moment.
    unnamed = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            with os.fdopen(os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(48) + "\n")
            with suppress(FileExistsError):
                path.hardlink_to(unnamed)
        finally:
            unnamed.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError("tokens.key_files", f"{path} cannot be created: {error}") from error


def _read(path: Path) -> str:
    try:
        with path.open(encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read().strip()
    except FileNotFoundError:
        cure = "`agentenv farm serve` creates it; give the farm's --config, or --url for a remote farm"
        raise ConfigError("tokens.key_files", f"{path} holds no key", next_step=cure) from None
    except (OSError, ValueError) as error:
        raise ConfigError("tokens.key_files", f"{path} cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        cure = f"chmod 600 {path}; if others may have read it, replace the key"
        raise ConfigError("tokens.key_files", f"{path} is readable by others", next_step=cure)
    if len(key) < _LEAST_KEY_CHARACTERS:
        raise ConfigError("tokens.key_files", f"{path} holds no key of at least {_LEAST_KEY_CHARACTERS} characters")
    return key


class DeniedFile:
    """The ids of tokens that were revoked while a farm ran, one a line, in a file beside the key that signs: the next
    service reads them."""

    def __init__(self, keys: Sequence[Path]) -> None:
        self._path = keys[0].with_name(f"{keys[0].name}.denied")

    def read(self) -> frozenset[str]:
        """All of them. Raises ConfigError: a service that does not know them must not serve."""
        try:
            return frozenset(self._path.read_text(encoding="ascii").split())
        except FileNotFoundError:
            return frozenset()
        except (OSError, ValueError) as error:
            raise ConfigError("tokens.key_files", f"{self._path} cannot be read: {error}") from error

    def add(self, jti: str) -> None:
        """Add one. Raises OSError."""
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(jti + "\n")
            file.flush()
            os.fsync(file.fileno())
