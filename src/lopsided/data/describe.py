"""Describe the content of a source before training."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import numpy as np

from lopsided.data.images import FileImages, Known, Progress, Vectors
from lopsided.data.listed import Labelled
from lopsided.data.sources import Source, open_source
from lopsided.data.sources.listing import SPLITS
from lopsided.data.sources.names import name_cautions
from lopsided.data.sources.source import KINDS
from lopsided.recipe.words import listed

_ALL = Labelled()


def list_sources() -> list[dict[str, Any]]:
    """Return for each named source whether it is on this machine, and its place or how to get it."""
    found = [(kind.name, *kind.find()) for kind in KINDS if kind.find is not None]
    return [{"name": name, "found": there, "where": where} for name, there, where in found]


def describe(
    data: str | os.PathLike[str],
    listed: Labelled = _ALL,
    *,
    progress: Progress | None = None,
    known: Known | None = None,
) -> dict[str, Any]:
    """Describe a source: classes, splits, groups, sizes, byte-identical images and unreadable images."""
    source = open_source(data, min_classes=1, **vars(listed))
    broken = source.images.unreadable(progress=progress, known=known)
    rows = np.setdiff1d(np.arange(len(source)), [index for index, _ in broken])
    duplicates = _duplicates(source, rows)
    return {
        "name": source.name,
        "images": len(source),
        "classes": source.counts(),
        "channels": None if isinstance(source.images, Vectors) else source.images.channels,
        "sizes": _sizes(source, rows),
        "groups": _groups(source),
        "splits": _split_counts(source),
        "duplicates": duplicates,
        "unreadable": [{"name": source.names[index], "reason": error.reason} for index, error in broken],
        "left_out": source.left_out,
        "notes": _notes(source, duplicates),
    }


def _sizes(source: Source, rows: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
    if isinstance(source.images, Vectors):
        return {"smallest": None, "largest": None, "same": True, "words": f"vectors of {source.images.width:,} numbers"}
    if isinstance(source.images, FileImages):
        sizes = source.images.take(rows).sizes()
    else:
        sizes = np.array([source.images.size(0)])
    if not len(sizes):
        return {"smallest": None, "largest": None, "same": False, "words": "no readable size"}
    area = sizes.prod(axis=1)
    (small_h, small_w), (large_h, large_w) = sizes[area.argmin()].tolist(), sizes[area.argmax()].tolist()
    same = bool((sizes == sizes[0]).all())
    words = f"{large_w} x {large_h} pixels" if same else f"{small_w} x {small_h} to {large_w} x {large_h} pixels"
    return {"smallest": [small_h, small_w], "largest": [large_h, large_w], "same": same, "words": words}


def _groups(source: Source) -> dict[str, int] | None:
    if source.groups is None:
        return None
    _, counts = np.unique(source.groups, return_counts=True)
    return {"number": len(counts), "largest": int(counts.max())}


def _split_counts(source: Source) -> dict[str, dict[str, int]] | None:
    if source.splits is None:
        return None
    present = [name for name in SPLITS if (source.splits == name).any()]
    return {name: source.subset(np.flatnonzero(source.splits == name)).counts() for name in present}


def _duplicates(source: Source, rows: np.ndarray[Any, np.dtype[np.int64]]) -> list[dict[str, Any]]:
    """Return sets of images with the same bytes, with their classes."""
    same: dict[str, list[int]] = defaultdict(list)
    for index, digest in zip(rows.tolist(), source.images.digest(rows), strict=True):
        same[digest].append(index)
    return [
        {
            "names": [source.names[i] for i in indices],
            "labels": sorted({source.classes[source.labels[i]] for i in indices}),
        }
        for indices in same.values()
        if len(indices) > 1
    ]


def _notes(source: Source, duplicates: list[dict[str, Any]]) -> list[str]:
    counts = source.counts()
    smallest, largest = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if len(counts) == 1:
        return [f"There is only one class, {smallest}: a model of it calls unusual what is unlike its images."]
    notes = ["All classes have the same number of images."]
    if counts[smallest] < counts[largest]:
        share = 100 * counts[largest] / len(source)
        notes = [
            f"{largest} has {counts[largest] / counts[smallest]:.1f} times as many images as {smallest}. Always "
            f"answering {largest} gives {share:.1f} % accuracy and a balanced accuracy of {1 / len(counts):.3f}."
        ]
    alone = [name for name, number in counts.items() if number < 2]
    if alone:
        verb = "has" if len(alone) == 1 else "each have"
        notes.append(f"{listed(alone)} {verb} only one image and cannot be tested.")
    notes += map(str, name_cautions(counts, source.names))
    conflicts = [item for item in duplicates if len(item["labels"]) > 1]
    if conflicts:
        first = conflicts[0]
        notes.append(
            f"Sets of byte-identical images with different labels: {len(conflicts):,}, the first "
            f"{' = '.join(first['names'])} ({' and '.join(first['labels'])})."
        )
    return notes
