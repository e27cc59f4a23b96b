"""docs/settings.md is what the models of the settings say."""

from __future__ import annotations

from agentenv.env.environment import AgentEnvConfig
from scripts import settings_page


def test_the_page_is_current_and_has_every_field() -> None:
    assert settings_page.page() == settings_page.PAGE.read_text(encoding="utf-8"), (
        "run: python scripts/settings_page.py"
    )
    assert [name for name in AgentEnvConfig.model_fields if f"| `{name}` |" not in settings_page.page()] == []
