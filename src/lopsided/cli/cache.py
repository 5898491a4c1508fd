"""The command ``lopsided cache``: show, fill and clear the cache of features."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lopsided.cli.look import complete_recipe
from lopsided.cli.options import AllowOutside, Json, Quiet, argument, option, words
from lopsided.cli.output import show, show_json, table
from lopsided.cli.sweeping import Cluster, cluster_mapper, refuse
from lopsided.errors import InputError, sentence

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lopsided.inference.pool import Mapper


def cache(
    action: Annotated[str, argument("show, fill or clear.", autocompletion=words("show", "fill", "clear"))] = "show",
    data: Annotated[
        str | None,
        argument(
            "With fill: a folder, table or source. The features that are not cached yet are computed.", metavar="DATA"
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        option(
            None,
            "With fill: the recipe whose encoder computes them. Default: the one that fit takes for these data.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    allow_outside: AllowOutside = False,
    engine: Cluster = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show, fill or clear the cache of features.

    A frozen encoder turns each image into features once. Later runs on the
    same images read the features from this cache. LOPSIDED_CACHE sets the
    folder of the cache, and LOPSIDED_CACHE_GIB its largest size (4 by
    default; 0 disables the cache).

    fill computes the features of labelled images before a run needs them.
    --engine ray shares the work among the machines of a cluster, which must
    see the images at the same paths.

    \b
    Examples:
      lopsided cache
      lopsided cache fill photos
      lopsided cache fill photos --engine ray:10.0.0.5:6379
      lopsided cache clear
    """
    if action not in ("show", "fill", "clear"):
        raise InputError(sentence("The action must be show, fill or clear", action))
    if action == "fill":
        if data is None:
            raise InputError("DATA is missing. Write lopsided cache fill DATA.")
        _fill(data, recipe, engine, allow_outside=allow_outside, quiet=quiet, as_json=as_json)
        return
    refuse({"DATA": data, "--recipe": recipe, "--engine": engine}, "is for fill", f"`lopsided cache {action}`")
    from lopsided.inference.feature_cache import cache_limit, cache_root, empty_cache, list_cache

    root, limit = cache_root(), cache_limit()
    if root is None:
        if as_json:
            show_json({"folder": None, "limit": limit, "spaces": []})
        else:
            show("The cache is disabled, because LOPSIDED_CACHE_GIB is 0 or there is no home folder.")
        return
    if action == "clear":
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
            space["encoder"],
            *((size, space.get("view", "identity")) if (size := space["image_size"]) else ("", "")),
            *(space["engine"], space["images"], f"{space['bytes'] / 1e6:,.1f}"),
        ]
        for space in spaces
    ]
    if rows:
        show(table(["encoder", "image size", "view", "engine", "images", "MB"], rows) + "\n")
    show(f"{total / 1e6:,.1f} MB of at most {limit / 1e6:,.0f} MB in {root}.")


def _fill(
    data: str,
    recipe: str | None,
    engine: str | None,
    *,
    allow_outside: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compute the features of a source."""
    from lopsided.data.prepare import Sources
    from lopsided.recipe import find_recipe
    from lopsided.runs.features import fill_cache
    from lopsided.runs.fitting import QUICK, choose_recipe
    from lopsided.runs.progress import counter

    def cluster(model: Path) -> AbstractContextManager[Mapper]:
        elsewhere = cluster_mapper(engine, model, keep=True)
        assert elsewhere is not None
        return elsewhere(None)

    far = cluster_mapper(engine, Path()) is not None  # Checks the options before images are read.
    changes, sources = {"data.allow_outside": True} if allow_outside else {}, Sources()
    if recipe is None:
        recipe, _ = choose_recipe(find_recipe(QUICK).override(**changes), data, sources)
    chosen = find_recipe(recipe).override(**changes)
    with counter("features", quiet=quiet) as progress:
        images, computed = fill_cache(
            chosen, data, cluster=cluster if far else None, progress=progress, sources=sources
        )
    if as_json:
        show_json({"data": data, "recipe": recipe, "images": images, "computed": computed})
    else:
        done = f"{computed:,} of {images:,} images were computed; the others were cached already"
        show(f"{done}. The features are those of the recipe {recipe}.")
