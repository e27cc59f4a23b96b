"""The job file's variables, and what of Nomad's JSON is taken for a fact."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from agentenv.config import ContainerSettings, Driver, NomadSettings
from agentenv.env.config import AgentFields
from agentenv.errors import ConfigError, SandboxUnavailableError
from agentenv.slots.backends.nomad.api import NomadApi
from agentenv.slots.backends.nomad.backend import NomadBackend, builds_image
from agentenv.slots.backends.nomad.facts import Allocation, Evaluation, Job, Node, TaskEvent, events
from agentenv.slots.backends.nomad.job import (
    SERVER_MIB,
    SERVER_PROCESSES,
    SLOT_OWN_PROCESSES,
    JobShape,
    check_shape,
    check_standing,
    hcl,
    job_text,
    job_variables,
)
from agentenv.slots.backends.nomad.owner import JobOwner
from agentenv.slots.backends.registry import make_backend
from agentenv.wire.spec import MIB, Bind, ContainerSpec, SlotLimits


def given(text: str, containers: ContainerSettings, settings: NomadSettings) -> dict[str, Any]:
    """The values of the job's variables, its spec parsed."""
    lines = dict(line.split(" = ", 1) for line in job_variables(text, containers, settings).splitlines())
    if "spec" in lines:
        lines["spec"] = json.loads(json.loads(lines["spec"].replace("$${", "${").replace("%%{", "%{")))
    return lines


@pytest.mark.parametrize("driver", get_args(Driver))
def test_the_job_file_takes_our_settings_for_every_driver(driver: str) -> None:
    settings = NomadSettings.model_validate({"driver": driver, "job_id": "farm-1", "memory_mib": 4096, "image": "/i"})
    text = job_text(settings)
    binds = () if driver == "vm" else (Bind("/a", "/b"),)
    containers = ContainerSettings(slots_per_container=3, env={"A": '${b} %{c} \b\n"é'}, binds=binds)
    values = given(text, containers, settings)
    assert values["spec"] == json.loads(containers.spec().to_json())
    assert {"job_id": '"farm-1"', "driver": f'"{driver}"', "memory_mib": "4096", "count": "0"}.items() <= values.items()
    assert text.count(f' = var.driver == "{driver}"') + text.count(f"    {driver} = {{") >= 2, "its config, its launch"
    assert "shutdown_delay" in text, "leases of a leaving container may end by themselves"


@pytest.mark.parametrize(
    ("containers", "image", "named"),
    [
        ({"binds": (Bind("/a", "/b"),)}, "/machine", "binds: is not possible in a virtual machine"),
        ({"allow_network": True}, "/machine", "allow_network: is not"),
        ({"isolation": "user"}, "/machine", "isolation: is not"),
        ({"limits": {"max_memory_bytes": 2**40}}, "/machine", r"limits\.max_memory_bytes: is not .*images"),
        ({}, "agentenv-sandbox:local", "image: .*agentenv image machine"),
    ],
)
@pytest.mark.parametrize("as_variable", [False, True])
def test_what_no_machine_can_be_is_refused_before_the_job_is(
    containers: dict[str, Any], image: str, named: str, as_variable: bool
) -> None:
    driver = {"variables": {"driver": '"vm"', "image": hcl(image)}} if as_variable else {"driver": "vm", "image": image}
    settings = NomadSettings.model_validate(driver)
    with pytest.raises(ConfigError, match=named):
        job_variables(job_text(settings), ContainerSettings(**containers), settings)


def test_a_machine_has_no_image_store() -> None:
    variables = {"driver": '"vm"', "image": '"/machine"', "image_store": '"/store"'}
    settings = NomadSettings(variables=variables)
    with pytest.raises(ConfigError, match="image_store: a virtual machine has no image store"):
        job_variables(job_text(settings), ContainerSettings(), settings)


def test_hcl_takes_nothing_for_a_template() -> None:
    assert hcl("${x} %{if} é") == '"$${x} %%{if} é"'
    assert hcl({"a": [1, True]}) == '{"a": [1, true]}'


def test_explicit_variables_come_last_and_must_exist() -> None:
    text = 'variable "spec" {\n}\nvariable "extra" {\n}\n'
    assert given(text, ContainerSettings(), NomadSettings(variables={"extra": "[1]"}))["extra"] == "[1]"
    assert job_variables(text, ContainerSettings(), NomadSettings(variables={"spec": '"{}"'})) == 'spec = "{}"\n'
    with pytest.raises(ConfigError, match=r"no variable 'other' \(it has extra, spec\)"):
        job_variables(text, ContainerSettings(), NomadSettings(variables={"other": "1"}))


def test_a_field_of_the_spec_may_be_given_as_if_it_were_a_variable() -> None:
    text = job_text(NomadSettings())
    variables = {"closed_networks": '["10.0.0.0/8"]', "limits": '{"processes": 2000}', "runtime": '"runsc"'}
    values = given(text, ContainerSettings(slots_per_container=20), NomadSettings(variables=variables))
    assert (values["spec"]["slots"], values["spec"]["closed_networks"]) == (20, ["10.0.0.0/8"])
    assert values["spec"]["limits"] == dataclasses.asdict(SlotLimits(processes=2000))
    assert values["pids_limit"] == str(20 * 2010 + 512), "what follows from them follows"
    assert values["runtime"] == '"runsc"'
    for name, wrong, said in (
        ("limits", "{ processes = 1 }", "variables: limits: .*as JSON"),
        ("output_bytes", '"1"', "variables.output_bytes: must be int"),
        ("output_bytes", "1", "output_bytes: got 1 "),
    ):
        with pytest.raises(ConfigError, match=said):
            given(text, ContainerSettings(), NomadSettings(variables={name: wrong}))


OLDER = "".join(f'variable "{name}" {{\n}}\n' for name in ("job_id", "slots", "limits", "env", "memory_mib"))


def test_a_job_file_of_an_older_version_is_given_what_it_has_variables_for() -> None:
    containers = ContainerSettings(slots_per_container=3, env={"A": "${b}"}, limits=SlotLimits(processes=7))
    values = given(OLDER, containers, NomadSettings(driver="raw_exec", variables={"slots": "7"}))
    assert values == {
        "job_id": '"agentenv-sandbox"',
        "memory_mib": str(3 * 2048 + 4096 + 512),
        "slots": "7",
        "limits": json.dumps(dataclasses.asdict(SlotLimits(processes=7))),
        "env": '{"A": "$${b}"}',
    }
    with pytest.raises(ConfigError, match="output_bytes: is 2048, but the job file has no variable") as no:
        job_variables(OLDER, ContainerSettings(output_bytes=2048), NomadSettings())
    assert "declare the variable `spec`" in no.value.next_step


def test_a_setting_the_file_cannot_take_is_refused() -> None:
    binds = ContainerSettings(binds=(Bind("/a", "/b"),))
    with pytest.raises(ConfigError, match=r"binds.*no variable 'binds'"):
        job_variables('variable "slots" {}', binds, NomadSettings())
    with pytest.raises(ConfigError, match=r"cpu_mhz.*no variable 'cpu_mhz'"):
        job_variables('variable "spec" {}', ContainerSettings(), NomadSettings(cpu_mhz=7))


def test_a_job_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="job_file"):
        job_text(NomadSettings(job_file=tmp_path / "none"))


def test_addresses_and_names_are_checked_before_anything_is_opened() -> None:
    with pytest.raises(ConfigError, match=r"nomad_address.*http"):
        NomadBackend(nomad=NomadSettings(address="unix:///run/nomad.sock"))
    with pytest.raises(ConfigError, match="local, nomad, fake"):
        make_backend("modal")
    assert [make_backend(name).name for name in ("local", "nomad", "fake")] == ["local", "nomad", "fake"]


@pytest.mark.parametrize(
    ("given", "address", "built"),
    [
        ({}, "http://127.0.0.1:4646", True),
        ({}, "https://localhost:4646", True),
        ({}, "http://nomad.example.com:4646", False),
        ({"build_image": False}, "http://127.0.0.1:4646", False),
        ({"driver": "raw_exec"}, "http://127.0.0.1:4646", False),
        ({"image": "registry.example.com/sandbox:1"}, "http://127.0.0.1:4646", False),
        ({"image": "mine:local"}, "http://127.0.0.1:4646", True),
    ],
)
def test_an_image_is_built_on_first_use_only_where_that_is_of_use(
    given: dict[str, Any], address: str, built: bool
) -> None:
    assert builds_image(NomadSettings(**given), address) is built


async def test_opening_builds_the_image_once_it_is_known_that_nomad_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    async def answers(_: object) -> None:
        steps.append("nomad")

    def ensure(image: str) -> None:
        steps.append(image)
        raise SandboxUnavailableError("no engine")

    async def owns(_: object) -> None:
        steps.append("owner")

    monkeypatch.setattr(NomadApi, "check_access", answers)
    monkeypatch.setattr(JobOwner, "acquire", owns)
    monkeypatch.setattr("agentenv.image.ensure.ensure_image", ensure)
    with pytest.raises(SandboxUnavailableError, match="no engine"):
        await make_backend("nomad", nomad=NomadSettings(image="mine:local")).__aenter__()
    assert steps == ["nomad", "owner", "mine:local"]


def test_the_event_streams_lines_become_facts() -> None:
    state = {
        "State": "dead",
        "Failed": True,
        "Restarts": 2,
        "Events": [
            {"Type": "Terminated", "DisplayMessage": "Exit Code: 9", "ExitCode": 9, "Details": {"oom_killed": "true"}}
        ],
    }
    raw = {
        "ID": "a1",
        "JobID": "farm",
        "Name": "farm.sandbox[3]",
        "NodeID": "n1",
        "ModifyIndex": 7,
        "ClientStatus": "failed",
        "DesiredStatus": "stop",
        "DesiredTransition": {"Migrate": True},
        "TaskStates": {"sandbox": state},
        "AllocatedResources": {"Shared": {"Ports": [{"Label": "http", "HostIP": "fd00::1", "Value": 2000}]}},
    }
    drain = {"Deadline": 90_000_000_000}
    line = {
        "Index": 7,
        "Events": [
            {"Topic": "Allocation", "Payload": {"Allocation": raw}},
            {"Topic": "Allocation", "Payload": {"Allocation": {**raw, "JobID": "another"}}},
            {"Topic": "Node", "Payload": {"Node": {"ID": "n1", "ModifyIndex": 8, "Name": "x", "DrainStrategy": drain}}},
            {"Topic": "Evaluation", "Payload": {"Evaluation": {"ID": "e", "JobID": "farm", "ModifyIndex": 9}}},
            {
                "Topic": "Job",
                "Payload": {"Job": {"ID": "farm", "ModifyIndex": 9, "TaskGroups": [{"Name": "sandbox", "Count": 4}]}},
            },
            {"Topic": "Job", "Type": "JobDeregistered", "Payload": {"Job": {"ID": "farm", "ModifyIndex": 10}}},
            {"Topic": "Deployment", "Payload": {}},
        ],
    }
    ended = TaskEvent("Terminated", "Exit Code: 9", 9, oom_killed=True)
    assert list(events(line, "farm")) == [
        Allocation("a1", 3, "n1", 7, "stop", "failed", True, "dead", True, 2, (ended,), "[fd00::1]:2000"),
        Node("n1", 8, "x", draining=True, drain_s=90),
        Evaluation("e", 9, "", {}),
        Job(9, 4),
        Job(10, 0, stopped=True),
    ]
    assert list(events({}, "farm")) == [], "a heartbeat"


def test_an_environments_config_says_where_its_farm_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOMAD_ADDR", "https://nomad.example:4646")
    monkeypatch.setenv("NOMAD_TOKEN", "secret")
    config = AgentFields(tool_pool_mode="nomad", sandbox_job_id="mine", container_memory_mib=4096, driver="raw_exec")
    settings = config.nomad_settings()
    assert (settings.address, settings.token) == ("https://nomad.example:4646", "secret")
    assert (settings.job_id, settings.memory_mib, settings.driver) == ("mine", 4096, "raw_exec")
    assert "secret" not in repr(settings)
    named = AgentFields(sandbox_job_variables='{"runtime": "\\"runsc\\""}').nomad_settings()  # as atropos' CLI has it
    assert 'runtime = "runsc"\n' in job_variables(job_text(named), ContainerSettings(), named)
    with pytest.raises(ConfigError, match="sandbox_job_variables"):
        AgentFields(sandbox_job_variables="runsc")
    assert AgentFields(nomad_address="http://other:1").nomad_settings().address == "http://other:1"
    monkeypatch.setenv("NOMAD_ADDR", "nomad.example:4646")
    with pytest.raises(ConfigError, match=r"nomad_address.*http"):
        AgentFields(tool_pool_mode="nomad")


def _job(
    *, slots: int = 10, memory_mib: int, memory_max_mib: int = 0, limits: str = "", pids_limit: int = 16384
) -> dict[str, Any]:
    """As Nomad parses the shipped file."""
    spec = f'{{"container":"%[[ env `A` ]]%","env":{{"slots":"99"}},{limits}"slots":{slots},"uid_block":%[[ b ]]%}}'
    task = {
        "Templates": [{"EmbeddedTmpl": "{{ with nomadVar }}"}, {"EmbeddedTmpl": spec}],
        "Config": {"pids_limit": pids_limit},
        "Resources": {"MemoryMB": memory_mib, "MemoryMaxMB": memory_max_mib},
    }
    return {"TaskGroups": [{"Tasks": [task]}]}


def _shape(**given: Any) -> JobShape:
    shape = JobShape.of(_job(**given))
    assert shape is not None
    return shape


def test_a_standing_job_is_read_whichever_version_registered_it() -> None:
    """As Nomad keeps it: by a variable for each setting once, of one `spec` now."""
    before = (
        '{"allow_network":false,"binds":[],"closed_networks":["attached","%[[ env `NOMAD_HOST_IP_http` ]]%/32"],'
        '"container":"%[[ env `NOMAD_ALLOC_ID` ]]%","data_dir":"/run/agentenv","env":{},"host":"0.0.0.0",'
        '"isolation":"full","limits":{"memory_bytes":1073741824},"output_bytes":1048576,"port":8642,"slots":7,'
        '"spare_shells":true,"token_file":"/secrets/token","uid_block":%[[ env `NOMAD_HOST_PORT_http` ]]%}'
    )
    now = before.replace('"output_bytes":1048576,', '"a_later_setting":{"slots":"2"},')
    task = {"Templates": [{"EmbeddedTmpl": ""}], "Config": {"pids_limit": 16384}, "Resources": {"MemoryMB": 7680}}
    for text in (before, now):
        job = {"TaskGroups": [{"Tasks": [{**task, "Templates": [{"EmbeddedTmpl": text}]}]}]}
        assert JobShape.of(job) == JobShape(7, 1024 * MIB, 7680, 0, SlotLimits().processes, 16384)


def test_a_container_holds_all_its_slots_by_default() -> None:
    lines = job_variables(job_text(NomadSettings()), ContainerSettings(), NomadSettings()).splitlines()
    assert {"memory_mib = 25088", "memory_max_mib = 0"} <= set(lines)
    small = ContainerSettings(slots_per_container=3, limits=SlotLimits(memory_bytes=1536 * MIB))
    lines = job_variables(job_text(NomadSettings()), small, NomadSettings()).splitlines()
    assert f"memory_mib = {3 * 1536 + 4096 + 512}" in lines
    check_shape(_shape(memory_mib=20992), ContainerSettings(), NomadSettings())
    few = ContainerSettings(slots_per_container=3)
    assert "memory_mib" not in job_variables('variable "slots" {}', few, NomadSettings()), "a file may have its own"


def test_less_memory_than_the_slots_may_use_is_refused_unless_named() -> None:
    with pytest.raises(
        ConfigError, match=r"memory_mib: a container of 2048 MiB cannot hold 10 slots of 2048 MiB"
    ) as no:
        check_shape(_shape(memory_mib=2048), ContainerSettings(), NomadSettings(memory_mib=2048))
    assert "20992 MiB" in str(no.value)
    assert "memory_oversubscription=true" in no.value.next_step
    named = NomadSettings(memory_mib=2048, memory_oversubscription=True)
    check_shape(_shape(memory_mib=2048), ContainerSettings(), named)
    lines = job_variables(job_text(named), ContainerSettings(), named).splitlines()
    assert {"memory_mib = 2048", "memory_max_mib = 25088"} <= set(lines), "where the scheduler allows it, it gets all"
    check_shape(_shape(memory_mib=2048, memory_max_mib=20992), ContainerSettings(), NomadSettings())
    own = _shape(memory_mib=2560, slots=2, limits='"limits":{"memory_bytes":1073741824},')
    assert own.slot_memory_bytes == 1024 * MIB
    check_shape(own, ContainerSettings(slots_per_container=2), NomadSettings())


def test_a_container_holds_slots_that_request_the_most_unless_it_is_oversubscribed() -> None:
    limits = SlotLimits(memory_bytes=1536 * MIB, max_memory_bytes=8192 * MIB)
    containers = ContainerSettings(slots_per_container=3, limits=limits, checkpoint_bytes=0)
    text = job_text(NomadSettings())
    usual_mib, most_mib = (3 * each_mib + SERVER_MIB for each_mib in (1536, 8192))
    for settings, memory_mib, max_mib in (
        (NomadSettings(), most_mib, 0),
        (NomadSettings(memory_oversubscription=True), usual_mib, most_mib),
        (NomadSettings(memory_oversubscription=True, memory_mib=2048), 2048, most_mib),
    ):
        values = given(text, containers, settings)
        assert (values["memory_mib"], values["memory_max_mib"]) == (str(memory_mib), str(max_mib))
    named = _shape(
        memory_mib=usual_mib, slots=3, limits='"limits":{"memory_bytes":1610612736,"max_memory_bytes":8589934592},'
    )
    with pytest.raises(ConfigError, match=r"cannot hold 3 slots of 8192 MiB .*limits\.max_memory_bytes"):
        check_shape(named, containers, NomadSettings(memory_mib=usual_mib))
    check_shape(named, containers, NomadSettings(memory_oversubscription=True))


def test_a_container_has_memory_for_its_checkpoints_too() -> None:
    text, named = job_text(NomadSettings()), ContainerSettings(slots_per_container=2, checkpoint_bytes=100 * MIB + 1)
    assert given(text, named, NomadSettings())["memory_mib"] == str(2 * 2048 + 101 + SERVER_MIB)
    none = ContainerSettings(slots_per_container=2, checkpoint_bytes=0)
    assert given(text, none, NomadSettings())["memory_mib"] == str(2 * 2048 + SERVER_MIB)


def test_a_container_has_processes_enough_for_all_its_slots() -> None:
    lines = job_variables(job_text(NomadSettings()), ContainerSettings(), NomadSettings()).splitlines()
    assert "pids_limit = 16384" in lines
    many = ContainerSettings(slots_per_container=41)
    enough = 41 * (400 + 10) + 512
    assert f"pids_limit = {enough}" in job_variables(job_text(NomadSettings()), many, NomadSettings()).splitlines()
    assert "pids_limit" not in job_variables('variable "slots" {}', many, NomadSettings()), "a file may have its own"
    check_shape(_shape(slots=41, memory_mib=99999, pids_limit=enough), many, NomadSettings())
    check_shape(_shape(slots=41, memory_mib=99999, pids_limit=0), many, NomadSettings())
    with pytest.raises(
        ConfigError, match="pids_limit: a container of 16384 processes cannot hold 41 slots of 400"
    ) as no:
        check_shape(_shape(slots=41, memory_mib=99999, pids_limit=16384), many, NomadSettings())
    assert str(enough) in no.value.next_step
    large = _shape(memory_mib=99999, limits='"limits":{"processes":2000},')
    with pytest.raises(ConfigError, match="10 slots of 2000 each"):
        check_shape(large, ContainerSettings(), NomadSettings())


def test_the_job_file_by_hand_computes_as_the_backend_does() -> None:
    text = job_text(NomadSettings())
    formula = f"max(16384, local.spec.slots * (try(local.spec.limits.processes, {SlotLimits().processes}) + "
    assert f"{formula}{SLOT_OWN_PROCESSES}) + {SERVER_PROCESSES})" in text
    usual = f"try(local.spec.limits.memory_bytes, {SlotLimits().memory_bytes})"
    assert f"max({usual}, try(local.spec.limits.max_memory_bytes, {SlotLimits().max_memory_bytes}))" in text
    assert f"local.spec.slots * local.slot_mib + local.checkpoint_mib + {SERVER_MIB}" in text
    assert f"try(local.spec.checkpoint_bytes, {ContainerSpec.checkpoint_bytes})" in text
    assert f"slots = {ContainerSpec().slots}, " in text
    assert "pids_limit  = local.pids_limit" in text
    assert "memory     = local.memory_mib" in text


def test_an_environments_container_may_be_oversubscribed_by_name() -> None:
    settings = AgentFields(container_memory_mib=4096, container_memory_oversubscription=True).nomad_settings()
    assert (settings.memory_mib, settings.memory_oversubscription) == (4096, True)
    assert AgentFields().nomad_settings().memory_mib is None


def test_slots_are_what_was_asked_for_and_no_running_container_is_replaced_for_another_number() -> None:
    with pytest.raises(ConfigError, match="slots_per_container: is 10, but the job asks for 7 slots"):
        check_shape(_shape(slots=7, memory_mib=99999), ContainerSettings(), NomadSettings())
    wanted, standing = _shape(memory_mib=20992), _shape(slots=16, memory_mib=99999)
    with pytest.raises(ConfigError, match=r"is 10, but the 4 containers of Nomad job 'f' that run have 16 slots each"):
        check_standing(standing, wanted, 4, "f")
    check_standing(standing, wanted, 0, "f")
    check_standing(wanted, wanted, 4, "f")
    check_standing(None, wanted, 4, "f")
    assert JobShape.of({"TaskGroups": [{"Tasks": [{"Templates": None}]}]}) is None
