"""A taskset of verifiers and its harness: a program of the image, which has no network, repairs a file with two calls
of the model that verifiers intercepts on this machine."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import verifiers.v1 as vf

PROGRAM = r"""
ask() {
    body="{\"model\": \"scripted\", \"messages\": [$1]}"
    exec 3<>"/dev/tcp/$HOST/$PORT"
    printf 'POST %s/chat/completions HTTP/1.0\r\nAuthorization: Bearer %s\r\n' "$ROOT" "$SECRET" >&3
    printf 'Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s' "${#body}" "$body" >&3
    sed '1,/^\r*$/d' <&3 | sed -n 's/.*"content": *"\([^"]*\)".*/\1/p'
}
first="{\"role\": \"user\", \"content\": \"$PROMPT\"}"
command=$(ask "$first")
said=$(eval "$command" 2>&1)
ask "$first, {\"role\": \"assistant\", \"content\": \"$command\"}, {\"role\": \"user\", \"content\": \"$said\"}"
"""


class SumTask(vf.Task[vf.TaskData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("/app/sum", b"echo $((40 - 2))\n")

    @vf.reward(weight=1.0)
    async def repaired(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return float((await runtime.run(["sh", "/app/sum"], {})).stdout == "42\n")


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> list[SumTask]:
        prompts = ("[task:repaired] repair /app/sum", "[task:lost] repair /app/sum")
        return [SumTask(vf.TaskData(prompt=prompt, network_allow=[]), self.config.task) for prompt in prompts]


class BashProgram(vf.Harness[vf.HarnessConfig]):
    async def launch(
        self, ctx: Any, trace: Any, runtime: vf.Runtime, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        at = urlsplit(endpoint)
        env = {"HOST": at.hostname or "", "PORT": str(at.port), "ROOT": at.path, "SECRET": secret}
        env["PROMPT"] = data.prompt_text
        return await runtime.run_program(["bash", "-ec", PROGRAM], env)


__all__ = ["BashProgram", "SumTaskset"]
