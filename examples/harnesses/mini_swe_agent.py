"""Slots as an environment of mini-swe-agent (docs/harnesses.md):

mini --environment-class mini_swe_agent.SlotEnvironment …
python mini_swe_agent.py --subset verified --split test -o out …     # mini-extra swebench
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minisweagent import environments
from minisweagent.environments.docker import DockerEnvironment
from minisweagent.run.benchmarks import swebench
from pydantic import BaseModel, ConfigDict

from agentenv import errors, shared_farm


class SlotConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")  # run_args, forward_env and the like of Docker
    image: str | None = None
    """None: this machine's programs."""
    cwd: str = ""
    """Where commands start; made if it is missing. Without it, where the image's do."""
    env: dict[str, str] = {}
    timeout: float = 30
    interpreter: list[str] = ["bash", "-lc"]
    network: str | list[str] = "public"
    """Of a slot with an image."""
    slots: int = 10
    """How many environments of this process can be there at once."""
    memory_mib: int = 4096
    """Of each."""
    start_timeout_s: float = 600


class SlotEnvironment(DockerEnvironment):
    """Its answers are those of mini-swe-agent's Docker environment. A failure of the farm is raised, and ends the run:
    the model does not see it."""

    def __init__(self, **config: Any) -> None:
        super().__init__(config_class=SlotConfig, **config)

    def _start_container(self) -> None:
        asked = self.config
        limits = {"memory_bytes": asked.memory_mib * 2**20}
        farm = shared_farm(
            slots=asked.slots, limits=limits, allow_network=True, start_timeout_s=asked.start_timeout_s
        ).blocking
        network = {"network": asked.network} if asked.image else {}
        self.box = farm.sandbox(asked.image, workdir=asked.cwd, **network).open()

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        timeout = timeout or self.config.timeout
        output: dict[str, Any] = {"output": "", "returncode": -1, "exception_info": ""}
        argv = ["sh", "-c", 'exec "$@" 2>&1', "sh", *self.config.interpreter, action.get("command", "")]
        try:
            done = self.box.exec(argv, cwd=cwd or None, env=self.config.env, timeout_s=timeout, output_bytes=64 * 2**20)
        except errors.InvalidArgumentsError as error:  # a null byte, say: nothing ran
            return output | {"exception_info": str(error)}
        output |= {"output": done.stdout, "returncode": done.exit_code}
        if done.timed_out:
            output |= {"returncode": -1, "exception_info": f"The command timed out after {timeout:g} seconds."}
        elif done.truncated:
            output["exception_info"] = f"{done.stdout_dropped_bytes} bytes are missing from the middle of the output."
        self._check_finished(output)
        return output

    def cleanup(self) -> None:
        if hasattr(self, "box"):
            self.box.close()


class _Progress(swebench.RunBatchProgressManager):
    """Without predictions of instances that failed through no fault of the policy: theirs would be empty ones, which
    are scored, and are not tried again by the next run."""

    def __init__(self, instances: int, report: Path) -> None:
        super().__init__(instances, report)
        self._predictions = report.with_name("preds.json")

    def on_instance_end(self, instance_id: str, exit_status: str | None) -> None:
        failure = getattr(errors, exit_status or "", None)
        if failure and not issubclass(failure, errors.SlotDestroyedError):
            swebench.remove_from_preds_file(self._predictions, instance_id)
        super().on_instance_end(instance_id, exit_status)


if __name__ == "__main__":
    # Images of instances are given to what is called "docker" only.
    environments._ENVIRONMENT_MAPPING["docker"] = f"{__name__}.SlotEnvironment"
    swebench.RunBatchProgressManager = _Progress
    swebench.app()
