"""What all unit tests have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentenv.store import layout


@pytest.fixture(scope="module", autouse=True)
def stores_of_one_range(request: pytest.FixtureRequest) -> Iterator[None]:
    """The files of a store's 4096 ranges of ids take longer to make than most tests of a store. Only slots of images
    use them, in tests/unit/sandbox and in the suites beside this one."""
    with pytest.MonkeyPatch.context() as patch:
        if "sandbox" not in request.path.parts:
            patch.setattr(layout, "RANGES", 1)
        yield
