"""What is asked of /app/means.json."""

import json
from pathlib import Path


def means() -> dict[str, float | None]:
    """What the agent wrote."""
    found: dict[str, float | None] = json.loads(Path("/app/means.json").read_text())
    return found


def test_each_listed_station_is_there_by_its_name() -> None:
    """No number is left, and no station that is not listed."""
    assert sorted(means()) == ["Airfield", "Harbour", "Old mill", "Summit"]


def test_means_are_in_degrees_celsius() -> None:
    """Both units, in any case, with a blank or without."""
    found = means()
    assert (found["Harbour"], found["Summit"], found["Old mill"]) == (11.2, -4.5, 9.4)


def test_a_station_without_readings_has_none() -> None:
    """It is null, not 0."""
    assert means()["Airfield"] is None
