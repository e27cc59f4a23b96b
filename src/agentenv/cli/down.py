"""``agentenv down``: end a farm."""

from __future__ import annotations

from agentenv.cli.options import BackendOption, JobOption, JsonOption, backend_of
from agentenv.cli.output import err, escape, print_json, run_to_end, verb


@verb
def down(backend: BackendOption = None, job: JobOption = None, as_json: JsonOption = False) -> None:
    """End the farm and everything that runs in it. Does nothing if there is none.

    local, fake: ends the `agentenv up` (or `farm serve`) that runs it, and its containers, also if that was killed.

    nomad: purges the job and its token; leases end as lost, and their rollouts are retried elsewhere.

    \b
    Examples:
      agentenv down
      agentenv down --backend nomad --job my-farm
    """
    from agentenv.farm.access import access_to

    chosen = backend_of(backend)
    access = access_to(chosen, job)
    with err().status("stopping the farm"):
        done = run_to_end(access.down())
    if as_json:
        print_json({"backend": chosen.value, "done": done})
    else:
        err().print(escape(done), soft_wrap=True)
