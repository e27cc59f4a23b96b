"""Reads ``atif.json``, or the files that are named, with Harbor's own models. Runs in an environment that has Harbor
(see ``atif_cases.py``), and needs nothing of this project."""

from __future__ import annotations

import json
import sys
from pathlib import Path

GOLDEN = Path(__file__).with_name("atif.json")

if __name__ == "__main__":
    from harbor.models.trajectories import Trajectory

    files = [Path(name) for name in sys.argv[1:]]
    documents = [json.loads(file.read_text()) for file in files] or json.loads(GOLDEN.read_text())
    for document in documents:
        read = Trajectory.model_validate(document)
        assert read.to_json_dict() == document, "Harbor read something else"
        others = [f", and {len(each.steps)} of {each.trajectory_id}" for each in read.subagent_trajectories or ()]
        print(f"{read.trajectory_id}: {len(read.steps)} steps, as {read.schema_version}{''.join(others)}")
