"""A Ray cluster of two nodes on this machine, for tests."""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny_command import SOURCE


def with_ray(test: Any) -> Any:
    """Mark a test that needs Ray, whose import alone takes seconds."""
    missing = importlib.util.find_spec("ray") is None
    return pytest.mark.slow(pytest.mark.skipif(missing, reason="ray is not installed")(test))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes of one core each, the second of which a test may kill."""
    patch = pytest.MonkeyPatch()
    # Ray makes its workers nicer than all others, which on a busy machine get no time then.
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "PYTHONPATH": str(SOURCE)}
    # As it does by itself on systems with a firewall that asks, Ray stays on the loopback interface.
    settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    settings["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # Versions of 2025 and 2026 warn of a change otherwise.
    for name, value in settings.items():
        patch.setenv(name, value)
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # It may have been imported before.
    cluster = Cluster()
    try:
        node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Older versions leave a log open when a node has started.
            cluster.add_node(**node, include_dashboard=False)
            # Older versions let the driver use a node with the address that is noted last, which cannot be killed then.
            note = Path(cluster.head_node.get_session_dir_path(), "node_ip_address.json")
            noted = note.read_bytes() if note.exists() else None
            cluster.second = cluster.add_node(**node | {"node_ip_address": "127.0.0.2"})
            if noted is not None:
                note.write_bytes(noted)
            gc.collect()
        assert cluster.address.startswith("127.0.0.1:")
        yield cluster
    finally:
        cluster.shutdown()
        patch.undo()
