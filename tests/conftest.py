from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tiny import write_photos

# How long a case takes says something about the other processes of the machine, and nothing about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that no worker begins a long file when the others have nothing left."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All workers share a cache of features with each other, and not with the user."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "LOPSIDED_CACHE", str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache")
        )
        patch.delenv("LOPSIDED_CACHE_GIB", raising=False)
        yield


@pytest.fixture(scope="module")
def photos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of small images, as many as ``PHOTOS`` of the module says; not to be changed."""
    counts = getattr(request.module, "PHOTOS", {"cat": 20, "dog": 10})
    return write_photos(tmp_path_factory.mktemp("data") / "photos", counts)
