"""Tables of vectors: an NPZ file with a matrix, or a Parquet table with a matrix or columns of numbers.

Nothing that is read can run code: arrays of objects, which numpy would unpickle, are refused.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from lopsided.data.images import Numbers, Vectors
from lopsided.data.sources.listing import Listing, check_filled, splits_of
from lopsided.data.sources.parquet import SUFFIXES, image_column, load_pyarrow, read_parquet, texts_of
from lopsided.data.stored import Place, is_address, reading
from lopsided.errors import DataError, InputError, sentence
from lopsided.files import check_regular
from lopsided.recipe.encoder_spec import MLP_NAME

LABELS, GROUPS, SPLITS = ("label", "labels", "y"), ("group", "groups"), ("split", "splits")
NAMES = ("name", "names", "id", "path")
"""Names of the columns or arrays that are not features."""
_FOR_IMAGES = ("encoder.weights", "encoder.views", "encoder.scaling", "data.image_size", "data.channels", "data.more")


def is_vectors(data: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a table of vectors: NPZ, or Parquet with lists of numbers or without paths.

    A damaged table is none; reading it as a table of images says what is wrong with it.
    """
    return _is_remote(os.fspath(data)) if is_address(data) else _is_local(Path(data))


@lru_cache(maxsize=64)
def _is_remote(address: str) -> bool:
    suffix = PurePosixPath(address).suffix.lower()
    if suffix not in SUFFIXES:
        return suffix == ".npz"
    with reading(address), Place(address).open("") as file:
        return _are_vectors(load_pyarrow()[1].read_schema(file))


def _is_local(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES or not path.is_file():
        return suffix == ".npz" and path.is_file()
    try:
        check_regular(path)
        return _are_vectors(load_pyarrow()[1].read_schema(path))
    except (ImportError, OSError, ValueError):
        return False


def _are_vectors(schema: Any) -> bool:
    arrow, _ = load_pyarrow()
    if any(_is_matrix(arrow, field.type) for field in schema):
        return True
    return "path" not in schema.names and image_column(schema) is None


def check_vector_fields(data: object, changes: Mapping[str, object]) -> None:
    """Raise if a field of a recipe is set that is for images, although the data are vectors."""
    wrong = [path for path in changes if path in _FOR_IMAGES or path.startswith("augment.")]
    if MLP_NAME.fullmatch(str(changes.get("encoder.name", "mlp"))) is None:
        wrong.append("encoder.name")
    if wrong and isinstance(data, str) and is_vectors(data):
        do = "Leave it out; the encoder of vectors is mlp or, without layers, identity."
        raise InputError(f"{wrong[0]} is a setting for images, but {data} holds vectors. {do}")


def list_vectors(path: Path, group: str | None, *, labelled: bool = True) -> Listing:
    """List the vectors of a table with their labels, groups, splits and names. Only ``labelled`` ones need labels."""
    columns = _read_npz(path) if path.suffix.lower() == ".npz" else _read_parquet(path)
    chosen = {name: _choose(columns, names) for name, names in (("label", LABELS), ("split", SPLITS), ("name", NAMES))}
    chosen["group"] = _choose(columns, GROUPS if group is None else (group,))
    if (labelled and chosen["label"] is None) or (group is not None and chosen["group"] is None):
        needed = [*(["label"] if labelled else []), *([] if group is None else [group])]
        got = f"{', '.join(columns)} in {path}"
        raise DataError(sentence(f"a table of vectors must have {' and '.join(needed)}", f"{got:.400}"))
    texts = {kind: None if name is None else texts_of(columns[name].tolist()) for kind, name in chosen.items()}
    features = {name: values for name, values in columns.items() if name not in chosen.values()}
    vectors = _vectors(path, features)
    rows = range(1, len(vectors) + 1)
    for kind, values in texts.items():
        if values is None:
            continue
        if len(values) != len(vectors):
            got = f"{len(values):,} in {chosen[kind]} for {len(vectors):,} vectors in {path}"
            raise DataError(sentence("there must be one entry for each vector", got))
        if labelled or kind == "name":
            check_filled(path, str(chosen[kind]), values, rows, "row")
    splits = texts["split"]
    return Listing(
        name=path.stem,
        where=str(path),
        images=vectors,
        labels=texts["label"] or [""] * len(vectors),
        names=texts["name"] or [str(row) for row in rows],
        groups=texts["group"],
        splits=None if splits is None or not labelled else splits_of(path, splits, rows, "row"),
    )


def _choose(columns: Mapping[str, object], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _vectors(path: Path, features: Mapping[str, npt.NDArray[Any]]) -> Vectors:
    """Return the matrix among arrays, or the columns of numbers side by side."""
    numeric = {name: values for name, values in features.items() if values.dtype.kind in "fiub"}
    matrices = [name for name, values in numeric.items() if values.ndim == 2]
    if len(matrices) > 1 or not numeric:
        got = f"{', '.join(matrices or features) or 'none'} in {path}"
        what = "one matrix" if matrices else "columns of numbers"
        raise DataError(sentence(f"a table of vectors must have {what}", f"{got:.400}"))
    used = [numeric[matrices[0]]] if matrices else [numeric[name] for name in numeric]
    narrow = all(values.dtype in (np.float32, np.float16) for values in used)
    matrix: Numbers = used[0] if matrices else np.stack([values.astype(np.float64) for values in used], axis=1)
    matrix = np.ascontiguousarray(matrix, dtype=np.float32 if narrow else np.float64)
    if not matrix.size:
        raise DataError(sentence(f"{path} must hold vectors", f"a matrix of the shape {matrix.shape}"))
    odd = np.flatnonzero(~np.isfinite(matrix).all(axis=1))
    if len(odd):
        got = f"{len(odd):,} of {len(matrix):,} with a missing or infinite value, the first in row {odd[0] + 1}"
        do = "Fill the values, or leave out the rows."
        raise DataError(sentence(f"the vectors of {path} must be finite numbers", got, do))
    return Vectors(matrix, () if matrices else tuple(numeric))


def _read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            arrays = {}
            for name in archive.namelist():
                with archive.open(name) as file:
                    arrays[name.removesuffix(".npy")] = np.lib.format.read_array(file, allow_pickle=False)
    # A damaged file raises almost anything, and its header may ask for terabytes.
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "allow_pickle" in reason:
            reason = "it holds Python objects, which could run code; save texts as numpy strings and numbers as numbers"
        raise DataError(f"Cannot read the vectors of {path} ({reason:.200}).") from error
    return {name: values.astype(np.str_) if values.dtype.kind == "S" else values for name, values in arrays.items()}


def _read_parquet(path: Path) -> dict[str, npt.NDArray[Any]]:
    arrow, _ = load_pyarrow()
    content = read_parquet(path)
    return {name: _array(arrow, path, name, content.column(name)) for name in content.column_names}


def _array(arrow: Any, path: Path, name: str, column: Any) -> npt.NDArray[Any]:
    """Return a column of Parquet: lists of numbers as a matrix, numbers as numbers, anything else as texts."""
    kind = column.type
    if _is_matrix(arrow, kind):
        rows = column.to_pylist()
        if any(row is None or len(row) != len(rows[0] or ()) for row in rows):
            raise DataError(sentence(f"the vectors in {name} of {path} must have the same length", "different ones"))
        width = arrow.types.is_float32(kind.value_type) or arrow.types.is_float16(kind.value_type)
        return np.array(rows, dtype=np.float32 if width else np.float64)
    if arrow.types.is_floating(kind) or arrow.types.is_integer(kind) or arrow.types.is_boolean(kind):
        values: npt.NDArray[Any] = column.to_numpy()
        return values.astype(np.float64) if values.dtype.kind == "O" else values  # Booleans with empty cells.
    return np.array(["" if value is None else str(value) for value in column.to_pylist()], dtype=np.str_)


def _is_matrix(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)))
