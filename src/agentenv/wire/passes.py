"""Passes: what a run may use of a container whose control token it must not have.

A pass names its run and is derived from the container's control token, so it is not stored: a holder of the token makes
and checks it. It opens no slot by itself; a lease of that run does. Pure, standard library only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

_FORM: Final = "p1"


def make_pass(control_token: str, run: str) -> str:
    """The pass of ``run``, for ``Authorization: Bearer``: letters, digits, ``-``, ``_`` and ``.`` only. Raises
    ValueError for an empty run, which would be the run of all leases without tags."""
    if not run:
        raise ValueError("a pass needs a run")
    name = run.encode()
    proof = hmac.new(control_token.encode(), b"pass\0" + name, hashlib.sha256).hexdigest()
    return f"{_FORM}.{base64.urlsafe_b64encode(name).decode().rstrip('=')}.{proof}"


def run_of_pass(control_token: str, given: str) -> str | None:
    """The run of a pass made with this token; None for anything else. The proof is compared in constant time."""
    form, _, rest = given.partition(".")
    encoded, _, _ = rest.partition(".")
    if form != _FORM:
        return None
    try:
        run = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True).decode()
        expected = make_pass(control_token, run)
    except (binascii.Error, ValueError):
        return None
    # The whole is compared, so each run has one pass: other spellings of its base64 are not accepted.
    same = hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogateescape"))
    return run if same else None
