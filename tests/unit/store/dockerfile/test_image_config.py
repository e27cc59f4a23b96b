"""An image's configuration, from and to its JSON."""

from __future__ import annotations

from agentenv.store.dockerfile.image_config import ImageConfig

OCI = {
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


def test_there_and_back() -> None:
    config = ImageConfig.from_oci({**OCI, "OnBuild": ["RUN x"], "Healthcheck": {"Test": ["NONE"]}})
    assert config.to_oci() == OCI
    assert config.env[2] == ("EQUALS", "a=b")
    assert config.on_build == ("RUN x",)


def test_what_is_not_set_is_left_out() -> None:
    for nothing in ({}, {"Env": None, "Labels": None, "Cmd": None, "User": ""}):
        config = ImageConfig.from_oci(nothing)
        assert config == ImageConfig()
        assert config.to_oci() == {}


def test_a_variable_keeps_its_place() -> None:
    config = ImageConfig(env=(("a", "1"), ("b", "2"))).with_env("a", "3").with_env("c", "4").with_label("l", "5")
    assert config.env == (("a", "3"), ("b", "2"), ("c", "4"))
    assert config.labels == (("l", "5"),)
