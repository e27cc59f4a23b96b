"""No value of a secret leaves a tool server: not in results, errors, logs, or the audit."""

from __future__ import annotations

import base64
import html
import json
import logging
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from agentenv.api.tool_server.core import ToolServer
from agentenv.api.tool_server.secrets import Secrets
from agentenv.api.tool_server.settings import ToolServerSettings
from agentenv.api.tool_server.tool import ToolFailure, ToolRun, tool
from agentenv.errors import ConfigError, PolicyRefusalError
from tests.unit.api.tool_server_box import Counted, ask, lines

SECRET = "hunter2 & the/rest+of=it"


def leaky(secret: str) -> dict[str, Any]:
    forms = [secret, quote(secret), base64.b64encode(secret.encode()).decode(), secret.encode().hex()]
    return {"text": f"<{secret}>", secret: forms, "deep": [{"a": (secret, 1)}]}


async def test_no_secret_leaves_in_results_errors_logs_or_the_audit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @tool(secrets=("vault",))
    async def look(how: str, *, run: ToolRun) -> Any:
        """Look."""
        secret = run.secrets["vault"]
        if how == "fail":
            raise ToolFailure(f"401 for {secret}")
        if how == "break":
            raise RuntimeError(f"no {secret}")
        if how == "refuse":
            raise PolicyRefusalError(f"not with {secret}")
        return leaky(secret)

    log = tmp_path / "audit.jsonl"
    caplog.set_level(logging.DEBUG)
    server = ToolServer([look], ToolServerSettings(audit_log=log), secrets=Secrets({"vault": SECRET}))
    async with server:
        results = [await ask(server, "look", how=how) for how in ("tell", "fail", "break", "refuse", SECRET)]
        results.append(await ask(server, "look", what=SECRET))
        assert SECRET not in repr(server)
    told = "".join(result.model_dump_json() for result in results) + log.read_text() + caplog.text
    for form in (SECRET, quote(SECRET), SECRET.encode().hex(), base64.b64encode(SECRET.encode()).decode()):
        assert form not in told
    assert isinstance(results[0].content, dict)
    assert results[0].content["text"] == "<[secret:vault]>"
    assert results[1].stderr == "401 for [secret:vault]"
    assert "[secret:vault]" in results[2].message
    assert [result.fault for result in results] == ["none", "none", "infra", "policy", "none", "model"]
    audit = lines(log)
    assert [entry["fault"] for entry in audit] == [result.fault for result in results]
    assert audit[4]["arguments"] == {"how": "[secret:vault]"}
    assert audit[0]["tool"] == "look"
    assert (audit[0]["trajectory"], audit[0]["group"], audit[0]["item"]) == ("t-0", "g", "item")
    assert [entry["source"] for entry in audit] == ["live", "live", "live", "refused", "live", "refused"]
    assert log.stat().st_mode & 0o077 == 0


def test_secrets_are_refused_when_they_could_not_be_removed() -> None:
    with pytest.raises(ConfigError, match=r"secrets\.short.*at least 6"):
        Secrets({"short": "abc"})
    assert "value-of" not in repr(Secrets({"name": "value-of-it"}))


def test_the_longest_secret_is_removed_first_and_numbers_are_looked_at() -> None:
    redactor = Secrets({"a": "123456", "b": "1234567890"}).redactor
    assert redactor.text("x1234567890x") == "x[secret:b]x"
    assert redactor.value({"n": 1234567890, "m": 7, "t": True}) == {"n": "[secret:b]", "m": 7, "t": True}


VALUE = "Zm9v/YmFy+cX&V4=ü="
WRITTEN = {
    "as it is": VALUE,
    "backwards": VALUE[::-1],
    "URL": quote(VALUE, safe=""),
    "URL, lower case": re.sub("%..", lambda found: found[0].lower(), quote(VALUE, safe="")),
    "URL, some": quote(VALUE, safe="/="),
    "URL, every character": "".join(f"%{byte:02x}" for byte in VALUE.encode()),
    "URL, twice": quote(quote(VALUE, safe=""), safe=""),
    "JSON": json.dumps(VALUE)[1:-1],
    "JSON of PHP": json.dumps(VALUE)[1:-1].replace("/", "\\/"),
    "JSON, escaped": VALUE.replace("/", "\\u002f").replace("+", "\\u002B"),
    "JSON in JSON": json.dumps(json.dumps(VALUE))[3:-3],
    "HTML": html.escape(VALUE),
    "HTML, hexadecimal": VALUE.replace("/", "&#x2F;").replace("=", "&#x3D;"),
    "HTML, decimal": VALUE.replace("/", "&#47;"),
    "HTML of a URL": quote(VALUE, safe="").replace("%", "&#37;"),
    "source code": "".join(f"\\x{byte:02x}" if byte < 128 else chr(byte) for byte in VALUE.encode("latin-1")),
    "base64": base64.b64encode(VALUE.encode()).decode(),
    "base64, in a URL": quote(base64.b64encode(VALUE.encode()).decode(), safe=""),
    "hexadecimal": VALUE.encode().hex(),
    "hexadecimal, mixed case": VALUE.encode().hex().title(),
    "hexadecimal with colons": VALUE.encode().hex(":"),
}


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_a_secret_is_found_however_it_is_written(written: str) -> None:
    redactor = Secrets({"key": VALUE}).redactor
    assert redactor.text(f"<a href='{written}'> &amp; 100 %") == "<a href='[secret:key]'> &amp; 100 %"


@pytest.mark.parametrize("user", ["u:", "us:", "use:"])
def test_a_secret_is_found_within_something_longer_in_base64(user: str) -> None:
    coded = base64.b64encode(f"{user}{VALUE}:more".encode()).decode()
    said = Secrets({"key": VALUE}).redactor.text(f"Basic {coded}")
    assert said.count("[secret:key]") == 1
    assert len(said) < len(f"Basic {user}:more[secret:key]") + 12


def test_what_holds_no_secret_stays_as_it_is() -> None:
    redactor = Secrets({"key": VALUE, "number": "123456"}).redactor
    for text in ("a%20b &amp; \\n \\", "100 % of %zz &#; &nothing; \\u12", "", "\\", "%", "12345", "ü \ud800 %ff%fe"):
        assert redactor.text(text) == text


async def test_a_result_is_cut_after_secrets_are_gone() -> None:
    @tool(secrets=("vault",))
    async def look(before: int, *, run: ToolRun) -> dict[str, str]:
        """Look."""
        return {"text": "x" * before + run.secrets["vault"] * 3}

    settings = ToolServerSettings(max_result_bytes=1_024)
    async with ToolServer([look], settings, secrets=Secrets({"vault": SECRET})) as server:
        for before in range(960, 1_030):
            result = await ask(server, "look", before=before)
            assert SECRET[:4] not in result.model_dump_json()


async def test_a_tool_gets_only_the_secrets_it_names() -> None:
    @tool(secrets=("one",))
    async def count(*, run: ToolRun) -> list[str]:
        """Count."""
        return sorted(run.secrets)

    async with ToolServer([count], secrets=Secrets({"one": "value-1", "two": "value-2"})) as server:
        assert (await ask(server, "count")).content == ["one"]


async def test_an_audit_that_cannot_be_written_does_not_take_calls_with_it(caplog: pytest.LogCaptureFixture) -> None:
    async with ToolServer([Counted().tool()], ToolServerSettings(audit_log=Path("/dev/full"))) as server:
        assert (await ask(server)).fault == "none"
    assert "lost a line (1 so far)" in caplog.text
    with pytest.raises(ConfigError, match="audit_log"):
        async with ToolServer([Counted().tool()], ToolServerSettings(audit_log=Path("/proc/none/audit"))):
            pass
