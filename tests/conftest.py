from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny import write_photos


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests share a cache of features with each other, and not with the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOPSIDED_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("LOPSIDED_CACHE_GIB", raising=False)
        yield


@pytest.fixture(scope="module")
def photos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of small images, as many as ``PHOTOS`` of the module says; not to be changed."""
    counts = getattr(request.module, "PHOTOS", {"cat": 20, "dog": 10})
    return write_photos(tmp_path_factory.mktemp("data") / "photos", counts)
