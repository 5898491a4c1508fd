from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests share a cache of features with each other, and not with the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOPSIDED_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("LOPSIDED_CACHE_GIB", raising=False)
        yield
