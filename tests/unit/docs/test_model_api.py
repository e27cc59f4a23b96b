"""docs/model-api.md is what the tables of the gateway's dialects say."""

from __future__ import annotations

from agentenv.gateway.server import DIALECTS
from scripts import model_api_page


def test_the_page_is_current_and_has_every_dialect() -> None:
    assert model_api_page.page() == model_api_page.PAGE.read_text(encoding="utf-8"), (
        "run: python scripts/model_api_page.py"
    )
    assert {module.DIALECT for module in model_api_page.DIALECTS.values()} == set(DIALECTS)
