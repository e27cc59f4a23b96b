"""my-env with players instead of a model: no GPU, no key, no network."""

from pathlib import Path

from atroposlib.envs.base import APIServerConfig
from my_env import MyEnv

from agentenv import AgentEnvConfig
from agentenv.testing import ScriptedPolicy, build_tokenizer, load_script

SCRIPT = load_script(Path(__file__).parent / "script.json")


async def test_the_sum_scores_one_and_a_guess_zero(tmp_path: Path) -> None:
    """script.json has two players: the first adds up, the second guesses."""
    config = AgentEnvConfig(
        tokenizer_name=str(build_tokenizer(tmp_path)), tool_pool_mode="fake", group_size=2, send_trajectory_id=True
    )
    async with ScriptedPolicy(SCRIPT) as policy:
        server = APIServerConfig(base_url=policy.base_url, model_name="scripted", api_key="unused")
        async with MyEnv(config, [server]) as env:
            group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group is not None
    assert group["scores"] == [1.0, 0.0]
