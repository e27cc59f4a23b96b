"""An image's configuration, as its JSON."""

from __future__ import annotations

from agentenv.builder.machine import ImageConfig


def test_what_is_set_is_written() -> None:
    config = ImageConfig(
        env=(("PATH", "/bin"), ("EMPTY", ""), ("EQUALS", "a=b")),
        user="app:staff",
        workdir="/srv",
        cmd=(),
        entrypoint=("/x",),
        shell=("/bin/bash", "-c"),
        labels=(("a", "1"),),
        ports=("80/tcp",),
        volumes=("/data",),
        stop_signal="SIGINT",
    )
    assert config.to_oci() == {
        "Env": ["PATH=/bin", "EMPTY=", "EQUALS=a=b"],
        "User": "app:staff",
        "WorkingDir": "/srv",
        "Shell": ["/bin/bash", "-c"],
        "Labels": {"a": "1"},
        "ExposedPorts": {"80/tcp": {}},
        "Volumes": {"/data": {}},
        "StopSignal": "SIGINT",
        "Cmd": [],
        "Entrypoint": ["/x"],
    }


def test_what_is_not_set_is_left_out() -> None:
    assert ImageConfig().to_oci() == {}


def test_a_variable_keeps_its_place() -> None:
    config = ImageConfig(env=(("a", "1"), ("b", "2"))).with_env("a", "3").with_env("c", "4").with_label("l", "5")
    assert config.env == (("a", "3"), ("b", "2"), ("c", "4"))
    assert config.labels == (("l", "5"),)
