"""What is said when Ray cannot be joined. None of it needs a cluster."""

from __future__ import annotations

import time
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("psutil")

from pollux.engines.ray import connection, engine  # noqa: E402
from pollux.engines.ray.engine import RayEngine, RaySettings, end_ray_supervisor  # noqa: E402
from pollux.engines.ray.network import free_port  # noqa: E402
from pollux.errors import EngineError  # noqa: E402
from tests.unit.engines.ray.test_network import silent_host  # noqa: E402

MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.9.0
    Python: 3.9.1
This process on node 10.0.0.7 was started with:
    Ray: 2.60.0
    Python: 3.11.2
"""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let Ray fail to join, in its own words."""

    def make(error: Exception) -> None:
        def init(**_: Any) -> None:
            raise error

        monkeypatch.setattr(ray, "init", init)
        monkeypatch.setattr(connection, "can_connect", lambda *_: "")
        monkeypatch.setattr(connection, "speaks_tls", lambda *_: None)

    return make


def settings(address: str) -> RaySettings:
    return RaySettings(address=address, name="x", owner="me")


def test_a_port_at_which_nobody_listens(tmp_path):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    began = time.monotonic()
    with pytest.raises(EngineError) as error:
        RayEngine(tmp_path, settings(address), launch_of=lambda job: None)
    assert f"no Ray answers at {address} (Connection refused)" in str(error.value)
    assert "leave --address out to start a head" in str(error.value)
    with pytest.raises(EngineError, match="no Ray answers"):
        end_ray_supervisor(tmp_path, settings(address), 5.0)
    assert time.monotonic() - began < engine.START_TIMEOUT_S / 2


def test_a_host_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(connection, "REACH_S", 0.5)
    with silent_host() as (host, port):
        began = time.monotonic()
        with pytest.raises(connection.Refused, match=r"no Ray answers at 127.*\(timed out\): see that the head runs"):
            connection.connect(f"{host}:{port}")
        assert time.monotonic() - began < 30.0  # by itself Ray tries for longer


def test_other_versions(failing):
    failing(RuntimeError(MISMATCH))
    with pytest.raises(connection.Refused) as error:
        connection.connect("10.0.0.1:6379")
    assert "the Ray cluster at 10.0.0.1:6379 and this machine have different versions" in str(error.value)
    assert "started with: Ray: 2.9.0 Python: 3.9.1" in str(error.value)
    assert f"this is Ray {ray.__version__}" in str(error.value) and "\n" not in str(error.value)


def test_rays_message_about_versions_is_still_known():
    """The translation goes by its words."""
    from ray._private import utils

    cluster = {"ray_version": "2.9.0", "python_version": "3.9.1"}
    with pytest.raises(RuntimeError, match="ersion mismatch"):
        utils.check_version_info(cluster, "this process", raise_on_mismatch=True)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Could not find any running Ray instance.\nmore"),
        ValueError("no such node"),
        TimeoutError("too late"),
    ],
)
def test_a_machine_that_is_none_of_the_clusters(failing, error):
    failing(error)
    with pytest.raises(connection.Refused, match="the server must run on a machine of the cluster") as refused:
        connection.connect("10.0.0.1:6379")
    assert str(error).splitlines()[0] in str(refused.value) and "more" not in str(refused.value)


def test_any_other_refusal(failing):
    failing(RuntimeError("\nthe moon is full\nand more"))
    with pytest.raises(connection.Refused, match=r"Ray at 10\.0\.0\.1:6379 cannot be joined: the moon is full$"):
        connection.connect("10.0.0.1:6379")
