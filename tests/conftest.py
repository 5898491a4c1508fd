from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests share a cache of features with each other, and not with the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOPSIDED_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("LOPSIDED_CACHE_GIB", raising=False)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files with the most slow tests first, so that no worker is left with one of them at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: -slow[item.path])
