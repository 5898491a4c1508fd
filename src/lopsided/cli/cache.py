"""The command ``lopsided cache``, which shows and empties the cache of features."""

from __future__ import annotations

from typing import Annotated

import typer

from lopsided.cli.output import Json, show, show_json, table


def cache(
    empty: Annotated[bool, typer.Option("--empty", help="Remove all cached features.")] = False,
    as_json: Json = False,
) -> None:
    """Show or empty the cache of features.

    A frozen encoder turns each image into features once. Later runs on the
    same images read the features from this cache. LOPSIDED_CACHE sets the
    folder of the cache, and LOPSIDED_CACHE_GIB its largest size (4 by
    default; 0 disables the cache).

    \b
    Examples:
      lopsided cache
      lopsided cache --empty
    """
    from lopsided.inference.feature_cache import cache_limit, cache_root, empty_cache, list_cache

    root, limit = cache_root(), cache_limit()
    if root is None:
        if as_json:
            show_json({"folder": None, "limit": limit, "spaces": []})
        else:
            show("The cache is disabled, because LOPSIDED_CACHE_GIB is 0 or there is no home folder.")
        return
    if empty:
        freed = empty_cache(root)
        if as_json:
            show_json({"folder": str(root), "limit": limit, "removed": freed, "spaces": []})
        else:
            show(f"Removed {freed / 1e6:,.1f} MB from {root}.")
        return
    spaces = list_cache(root)
    if as_json:
        show_json({"folder": str(root), "limit": limit, "spaces": spaces})
        return
    total = sum(space["bytes"] for space in spaces)
    rows = [
        [
            *(space["encoder"], space["image_size"], space.get("view", "identity")),
            *(space["engine"], space["images"], f"{space['bytes'] / 1e6:,.1f}"),
        ]
        for space in spaces
    ]
    if rows:
        show(table(["encoder", "image size", "view", "engine", "images", "MB"], rows) + "\n")
    show(f"{total / 1e6:,.1f} MB of at most {limit / 1e6:,.0f} MB in {root}.")
