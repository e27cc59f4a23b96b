"""A tool server's file, tokens and modules."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentenv.api.assembly import tool_server, tools_of_module
from agentenv.api.tool_server.auth import authorized, read_token, token_from
from agentenv.api.tool_server.settings import SearchSettings, ToolServerSettings
from agentenv.api.web.search import DIALECTS
from agentenv.env.config import AgentFields
from agentenv.env.tools import default_tool_server
from agentenv.errors import ConfigError
from agentenv.farm_client.access import token_of
from agentenv.tools.toolsets import TOOLSETS

PAGE = Path(__file__).parents[3] / "docs" / "tool-server.md"


def written(directory: Path, text: str) -> ToolServerSettings:
    path = directory / "tools.toml"
    path.write_text(text)
    return ToolServerSettings.from_file(path)


def test_paths_are_taken_from_the_files_directory(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("value-of-key\n")
    settings = written(
        tmp_path,
        """
        audit_log = "log/audit.jsonl"
        modules = ["mine.py", "some.module"]
        [secrets]
        key = { file = "key" }
        [cassettes]
        mode = "record"
        directory = "tapes"
        """,
    )
    assert settings.audit_log == tmp_path / "log/audit.jsonl"
    assert settings.modules == (str(tmp_path / "mine.py"), "some.module")
    assert settings.cassettes.directory == tmp_path / "tapes"
    assert settings.secret_values() == {"key": "value-of-key"}


def test_a_secret_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ToolServerSettings.model_validate({"secrets": {"key": {"env": "SOME_KEY_OF_A_TEST"}}})
    with pytest.raises(ConfigError, match=r"\$SOME_KEY_OF_A_TEST is empty"):
        settings.secret_values()
    monkeypatch.setenv("SOME_KEY_OF_A_TEST", "value-of-key")
    assert settings.secret_values() == {"key": "value-of-key"}


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("modul = []", "modul", "did you mean"),
        ('[cassettes]\ndirektory = "x"', "cassettes.direktory", "did you mean cassettes.directory?"),
        ("not toml", "config", "cannot be read"),
        ("[secrets]\nkey = {}", "secrets.key", "either file or env"),
        ('[search]\nprovider = "brave"', "search", "needs a key"),
        ('[search]\nprovider = "searxng"', "search", "give its url"),
        ('[search]\nprovider = "custom"', "search", "dialect is required"),
        ('[search]\nprovider = "bing"', "search.provider", "'searxng'"),
        ('[cassettes]\nmode = "record"', "cassettes", "needs a directory"),
        ("max_result_bytes = 1", "max_result_bytes", "1024"),
        ('[[network.allow]]\nhost = "a"\nports = [0]', "network.allow.0.ports.0", "greater than"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, text)
    assert caught.value.field == field
    assert said in str(caught.value)


def test_a_missing_file_or_secret_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        ToolServerSettings.from_file(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"secrets\.key"):
        tool_server(written(tmp_path, '[secrets]\nkey = { file = "gone" }'))


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    blocks: list[str] = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in blocks:
        written(tmp_path, block)
    assert {name for name in ToolServerSettings.model_fields if name in "\n".join(blocks)} == set(
        ToolServerSettings.model_fields
    )


def test_what_nobody_configured_says_so() -> None:
    described = {tool.name: tool.unavailable for tool in tool_server().describe().tools}
    assert "no search provider" in described["web_search"]
    assert "allow list is empty" in described["http_fetch"]
    assert set(described) == {*TOOLSETS["web"], *TOOLSETS["browser"]}
    gone = ToolServerSettings.model_validate(
        {"network": {"allow": [{"host": "*"}]}, "browser": {"executable": "/no/such/chromium"}}
    )
    described = {tool.name: tool.unavailable for tool in tool_server(gone).describe().tools}
    assert described["http_fetch"] == ""
    assert "no Chromium" in described["browser_navigate"]
    assert [tool.name for tool in tool_server(ToolServerSettings(builtin_tools=False)).describe().tools] == []


def test_ones_own_modules_are_served(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from agentenv.api.tool_server.tool import tool\n\n\n@tool()\nasync def hello(name: str) -> str:\n"
        "    'Greet.'\n    return f'hello {name}'\n"
    )
    settings = written(tmp_path, 'modules = ["mine.py"]\nbuiltin_tools = false')
    assert [tool.name for tool in tool_server(settings).describe().tools] == ["hello"]
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    for name, said in (("empty.py", "has no tool"), ("broken.py", "ModuleNotFoundError"), ("gone.py", "no such file")):
        with pytest.raises(ConfigError, match=said):
            tools_of_module(str(tmp_path / name))
    with pytest.raises(ConfigError, match="cannot be imported"):
        tools_of_module("no.such.module")


def test_search_providers_are_data() -> None:
    for name in DIALECTS:
        SearchSettings.model_validate({"provider": name, "url": "http://x", "key": "k"})
    with pytest.raises(ValidationError):
        SearchSettings.model_validate({"provider": "brave", "key": "k", "dialect": {"url": "http://x"}})


def test_tokens_are_made_once_for_their_owner_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "token"
    made = token_from(path)
    assert len(made) > 30
    assert token_from(path) == made == read_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("short")
    with pytest.raises(ConfigError, match="at least 16"):
        token_from(path)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(path)
    with pytest.raises(ConfigError, match="cannot be created"):
        token_from(tmp_path / "no" / "token")
    for header, right in (
        (f"Bearer {made}", True), (f"bearer  {made} ", True), (made, False), (f"Basic {made}", False),
        (f"Bearer {made}x", False), ("Bearer ", False), (None, False), ("Bearer \ud800", False),
    ):  # fmt: skip
        assert authorized(header, made) is right


def test_an_environment_reads_its_token_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t" * 20 + os.linesep)
    assert token_of(f"file:{path}", "tool_server_token") == "t" * 20
    assert token_of("plain", "tool_server_token") == "plain"
    with pytest.raises(ConfigError, match="tool_server_token"):
        token_of(f"file:{tmp_path}/none", "tool_server_token")


def test_in_process_takes_the_same_file(tmp_path: Path) -> None:
    written(tmp_path, "builtin_tools = false")
    config = AgentFields(tool_server_url="inprocess", tool_server_config=str(tmp_path / "tools.toml"))
    assert default_tool_server(config).describe().tools == ()
    assert len(default_tool_server(AgentFields(tool_server_url="inprocess")).describe().tools) == 12


def test_a_token_file_that_everybody_may_read_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("t" * 20)
    for mode, warned in ((0o600, False), (0o640, False), (0o644, True)):
        path.chmod(mode)
        caplog.clear()
        assert token_of(f"file:{path}", "farm_token") == "t" * 20
        assert (str(path) in caplog.text) == warned
    assert "t" * 20 not in caplog.text
