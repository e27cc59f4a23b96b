"""Cases that Harbor itself has answered: a ``task.toml``, an instruction, files of rewards, steps. Data alone, which
the Python of Harbor can import too."""

from __future__ import annotations

HOST_ENV = {"OFFERED": "given"}
"""The variables of the machine that a task may name."""

TOML = {
    "nothing": "",
    "timeout none": "[agent]\n[verifier]\n",
    "timeouts": "[agent]\ntimeout_sec = 90\n[verifier]\ntimeout_sec = 1.5\n[environment]\nbuild_timeout_sec = 30\n",
    "timeout text": '[agent]\ntimeout_sec = "60"\n[verifier]\ntimeout_sec = " 7.5 "\n',
    "timeout inf": "[agent]\ntimeout_sec = inf\n",
    "timeout words": '[agent]\ntimeout_sec = "soon"\n',
    "timeout list": "[agent]\ntimeout_sec = [1]\n",
    "timeout zero": "[agent]\ntimeout_sec = 0\n",
    "timeout negative": "[verifier]\ntimeout_sec = -1\n",
    "timeout true": "[agent]\ntimeout_sec = true\n",
    "verifier a day": "[verifier]\ntimeout_sec = 86400\n",
    "verifier longer": "[verifier]\ntimeout_sec = 86401\n",
    "build zero": "[environment]\nbuild_timeout_sec = 0.0\n",
    "cpus": "[environment]\ncpus = 2\n",
    "cpus half": "[environment]\ncpus = 0.5\n",
    "cpus text": '[environment]\ncpus = "2"\n',
    "cpus text half": '[environment]\ncpus = "1.5"\n',
    "cpus inf": "[environment]\ncpus = inf\n",
    "cpus words": '[environment]\ncpus = "two"\n',
    "memory": "[environment]\nmemory_mb = 2048\nstorage_mb = 10240\n",
    "memory text": '[environment]\nmemory_mb = "2048"\nstorage_mb = "512"\n',
    "memory whole float": "[environment]\nmemory_mb = 2048.0\n",
    "memory float": "[environment]\nmemory_mb = 2048.5\n",
    "memory older": '[environment]\nmemory = "2G"\nstorage = "512M"\n',
    "memory older small": '[environment]\nmemory = "2g"\nstorage = "2048k"\n',
    "memory older float": '[environment]\nmemory = "1.5G"\nstorage = "0.5G"\n',
    "memory older blanks": '[environment]\nmemory = " 2G "\n',
    "memory older exponent": '[environment]\nmemory = "1e3M"\n',
    "memory older Gi": '[environment]\nmemory = "2Gi"\n',
    "memory older GB": '[environment]\nmemory = "2GB"\n',
    "memory older bare": '[environment]\nmemory = "2048"\n',
    "memory older unit": '[environment]\nmemory = "G"\n',
    "memory older number": "[environment]\nmemory = 2048\n",
    "memory twice alike": '[environment]\nmemory = "2G"\nmemory_mb = 2048\n',
    "memory twice": '[environment]\nmemory = "2G"\nmemory_mb = 1024\n',
    "storage twice": '[environment]\nstorage = "2G"\nstorage_mb = 1024\n',
    "env": '[environment.env]\nA = "b"\nC = "$5"\nD = "$$x"\nE = ""\n',
    "env template": '[environment.env]\nA = "${OFFERED}"\nB = "${OFFERED:-x}"\nC = "${MISSING:-d}"\n',
    "env template empty": '[environment.env]\nD = "${MISSING:-}"\n',
    "env default with braces": '[environment.env]\nA = "${MISSING:-a}b}"\nB = "${MISSING:-{\\"x\\": 1}}"\n',
    "env within": '[environment.env]\nA = "x${OFFERED}y"\nP = "/x:${PATH}"\nQ = "a-${MISSING:-x}-b"\n',
    "env within blanks": '[environment.env]\nR = "${OFFERED} "\n',
    "env two": '[environment.env]\nA = "${OFFERED}${OFFERED}"\n',
    "env missing": '[environment.env]\nA = "${MISSING}"\n',
    "env odd name": '[environment.env]\nA = "${MISS ING:-d}"\n',
    "env number": "[environment.env]\nA = 1\n",
    "env of verifier": '[verifier.env]\nA = "${OFFERED}"\nB = "a${OFFERED}"\n[solution.env]\nC = "${MISSING:-d}"\n',
    "network public": '[environment]\nnetwork_mode = "public"\n',
    "network none": '[environment]\nnetwork_mode = "no-network"\n[agent]\nnetwork_mode = "public"\n',
    "network bogus": '[environment]\nnetwork_mode = "some"\n',
    "allowlist": '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b", "*.b.c", "192.0.2.0/24"]\n',
    "allowlist of agent": '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example"]\n',
    "allowlist of nobody": '[environment]\nnetwork_mode = "allowlist"\n',
    "allowlist empty": '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = []\n',
    "hosts with public": '[environment]\nnetwork_mode = "public"\nallowed_hosts = ["a.example"]\n',
    "hosts without mode": '[environment]\nallowed_hosts = ["a.example"]\n',
    "hosts of agent without mode": '[agent]\nallowed_hosts = ["a.example"]\n',
    "hosts of agent empty without mode": '[agent]\nallowed_hosts = []\n[environment]\nnetwork_mode = "no-network"\n',
    "hosts empty": "[environment]\nallowed_hosts = []\n",
    "hosts malformed": '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["no host!"]\n',
    "internet false": "[environment]\nallow_internet = false\n",
    "internet true": "[environment]\nallow_internet = true\n",
    "internet false agent public": '[environment]\nallow_internet = false\n[agent]\nnetwork_mode = "public"\n',
    "users": '[agent]\nuser = 1000\n[verifier]\nuser = "root"\n',
    "user float": "[agent]\nuser = 1.5\n",
    "healthcheck": '[environment.healthcheck]\ncommand = "true"\nretries = 5\nstart_period_sec = 1.5\n',
    "healthcheck text": '[environment.healthcheck]\ncommand = "true"\ninterval_sec = "2"\nretries = "4"\n',
    "healthcheck empty": "[environment.healthcheck]\n",
    "healthcheck without command": "[environment.healthcheck]\nretries = 2\n",
    "shared": '[verifier]\nenvironment_mode = "shared"\n',
    "separate": '[verifier]\nenvironment_mode = "separate"\n',
    "separate by a table": "[verifier.environment]\ncpus = 1\n",
    "separate by an empty table": "[verifier.environment]\n",
    "shared with a table": '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n',
    "mode bogus": '[verifier]\nenvironment_mode = "other"\n',
    "network of its machine": '[verifier.environment]\nnetwork_mode = "no-network"\n',
    "unknown": "foo = 1\n[agent]\nmood = 2\n",
    "workdir": '[environment]\nworkdir = "/app"\n',
    "os": '[environment]\nos = "Linux"\n',
    "gpus": "[environment]\ngpus = 1\n",
    "os windows": '[environment]\nos = "windows"\n',
}

ONLY_HERE = {
    "timeout zero": "nobody can do anything in no time",
    "timeout negative": "nobody can do anything in no time",
    "build zero": "nobody can build anything in no time",
    "timeout true": "true is no number",
    "verifier longer": "a call has at most a day",
    "memory older number": "Harbor leaves the number out, and with it the limit",
    "gpus": "slots have none",
    "os windows": "slots have Linux",
}
"""Cases that are refused here and not by Harbor, and why."""

INSTRUCTIONS = {
    "plain": "Do it.\n",
    "html": "<!-- bench-canary GUID 0 do not train -->\n\nDo it.\n",
    "two": "<!-- CANARY a -->\n# terminal-bench-canary GUID 1\n\n\nDo it.\n# canary stays\n",
    "blanks around": "  # a canary \n \nDo it.",
    "not first": "Do it.\n<!-- canary -->\n",
    "blank before": "\n# canary\nDo it.\n",
    "heading": "# Canary islands\nDo it.\n",
    "heading without": "# Islands\nDo it.\n",
    "comment goes on": "<!-- canary\n-->\nDo it.\n",
    "two on a line": "<!-- canary --> Do it.\nNow.\n",
    "carriage returns": "# canary\r\n\r\nDo it.\r\nNow.\r\n",
    "leading blanks": "\n\n  Do it.\n\n",
    "only": "# canary\n\n",
}

REWARDS = {
    "both": {"reward.json": '{"reward": 0.0}', "reward.txt": "50"},
    "both and broken": {"reward.json": "{", "reward.txt": "1"},
    "both and texts": {"reward.json": '{"reward": 1.0, "note": "good", "all": [1]}', "reward.txt": "1"},
    "json": {"reward.json": '{"reward": 0.25, "speed": 9}'},
    "json true": {"reward.json": '{"reward": true}'},
    "json false": {"reward.json": '{"reward": false, "other": 2}'},
    "json text": {"reward.json": '{"reward": "1"}'},
    "json null": {"reward.json": '{"reward": null}'},
    "json nan": {"reward.json": '{"reward": NaN}'},
    "json too large": {"reward.json": '{"reward": 1e309}'},
    "json number": {"reward.json": "1"},
    "json list": {"reward.json": "[1]"},
    "json empty": {"reward.json": "", "reward.txt": "1"},
    "json blanks": {"reward.json": ' \n{"reward": 1}\n '},
    "text": {"reward.txt": "1\n"},
    "text blanks": {"reward.txt": "  0.5 \n\n"},
    "text underscores": {"reward.txt": "1_0"},
    "text empty": {"reward.txt": ""},
    "text two": {"reward.txt": "1 2"},
    "text word": {"reward.txt": "true"},
    "text nan": {"reward.txt": "nan"},
    "text inf": {"reward.txt": "-inf"},
    "neither": {},
}

_TWO = '[[steps]]\nname = "a"\n{}\n[[steps]]\nname = "b"\n{}\n'

STEPS = {
    "two": _TWO.format("", ""),
    "none": "steps = []\n",
    "no name": "[[steps]]\n",
    "strategy": 'multi_step_reward_strategy = "final"\n' + _TWO.format("", ""),
    "strategy mean": 'multi_step_reward_strategy = "mean"\n' + _TWO.format("", ""),
    "strategy bogus": 'multi_step_reward_strategy = "sum"\n' + _TWO.format("", ""),
    "same name": '[[steps]]\nname = "a"\n[[steps]]\nname = "A"\n',
    "name with a slash": '[[steps]]\nname = "a/b"\n',
    "name with dots": '[[steps]]\nname = ".."\n',
    "name of a device": '[[steps]]\nname = "nul.txt"\n',
    "name with a dot at its end": '[[steps]]\nname = "a."\n',
    "name in words": '[[steps]]\nname = "Étape 1 (été)"\n',
    "agent timeouts": "[agent]\ntimeout_sec = 90\n" + _TWO.format("agent.timeout_sec = 5", ""),
    "verifier timeouts": "[verifier]\ntimeout_sec = 90\n" + _TWO.format("verifier.timeout_sec = 5", ""),
    "users": '[agent]\nuser = "u"\n[verifier]\nuser = "v"\n' + _TWO.format('agent.user = "u"\nverifier.user = 7', ""),
    "env": '[verifier.env]\nA = "a"\nB = "${OFFERED}"\n'
    + _TWO.format('verifier.env = {A = "own", C = "${MISSING:-d}"}', ""),
    "network of a step": '[agent]\nnetwork_mode = "no-network"\n'
    + _TWO.format(
        'agent.network_mode = "allowlist"\nagent.allowed_hosts = ["a.b"]\nverifier.network_mode = "public"', ""
    ),
    "network of the environment": '[environment]\nnetwork_mode = "no-network"\n' + _TWO.format("", ""),
    "network of all steps": '[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["x.y"]\n'
    + _TWO.format('verifier.network_mode = "no-network"', ""),
    "hosts without a mode": '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]\n'
    + _TWO.format('agent.allowed_hosts = ["c.d"]', ""),
    "separate step": _TWO.format('verifier.environment_mode = "separate"', ""),
    "separate by an environment": _TWO.format("verifier.environment = {cpus = 1}", ""),
    "separate all": '[verifier]\nenvironment_mode = "separate"\n'
    + _TWO.format('verifier.environment_mode = "shared"', ""),
    "separate environment of all": "[verifier.environment]\ncpus = 2\n"
    + _TWO.format('verifier.environment_mode = "shared"', "verifier.environment = {cpus = 3}"),
    "shared with an environment": _TWO.format('verifier = {environment_mode = "shared", environment = {cpus = 1}}', ""),
    "min reward": _TWO.format("min_reward = 0.5", "min_reward = {x = 1, y = 0.25}"),
    "min reward text": _TWO.format('min_reward = "0.5"', ""),
    "min reward list": _TWO.format("min_reward = [1]", ""),
    "healthcheck": '[environment.healthcheck]\ncommand = "all"\n'
    + _TWO.format('healthcheck = {command = "true", retries = 9}', ""),
    "artifacts": 'artifacts = ["/all"]\n' + _TWO.format('artifacts = ["/own", {source = "/more"}]', ""),
    "unknown": _TWO.format("mood = 1", ""),
}
"""Files of steps ``a`` and ``b``."""

STEP_REWARDS = {
    "one": [{"reward": 1.0}],
    "two": [{"reward": 1.0}, {"reward": 0.0}],
    "names": [{"reward": 1.0, "x": 2.0}, {"reward": 0.5, "y": 1.0}, {"y": 4.0}],
    "other name": [{"x": 0.25}, {"x": 0.75}],
}
"""The rewards of the steps that were played."""

SHORTFALLS: dict[str, tuple[float | dict[str, float], dict[str, float]]] = {
    "enough": (0.5, {"reward": 0.5}),
    "less": (0.5, {"reward": 0.25}),
    "another name": (0.5, {"x": 1.0}),
    "by name": ({"x": 1.0, "y": 0.5}, {"x": 1.0, "y": 0.75}),
    "one by name": ({"x": 1.0, "y": 0.5}, {"x": 1.0, "y": 0.25}),
    "negative": (-1.0, {"reward": -0.5}),
}
"""A ``min_reward``, and the rewards of its step."""
