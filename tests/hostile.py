"""Files as a stranger may send them: pickles that run code, broken and lying safetensors, text with odd content."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

TOKENS = [
    b"NaN", b"-Infinity", b"1e999", b"-1", b"9" * 5000, b"\xef\xbb\xbf", b'"\\ud800"', b"\xed\xa0\x80", b"[" * 5000,
    b'{"a":' * 3000, b"null", b"{}", b"[]", b'""', b"\0", b"true", b"\\", b'"', b"\n", b"\x1b[2J", b"0.1.2.3", b"'''",
]  # fmt: skip


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.mark,)


def pickles(mark: Path) -> dict[str, bytes]:
    """Files that make ``mark`` when they are unpickled: plain pickles, torch's archive and its old form, numpy's."""
    found = {f"pickle {protocol}": pickle.dumps(Evil(mark), protocol) for protocol in (0, 2, 5)}
    for zipped in (True, False):
        buffer = io.BytesIO()
        torch.save({"weight": Evil(mark)}, buffer, _use_new_zipfile_serialization=zipped)
        found[f"torch.save {zipped}"] = buffer.getvalue()
    buffer = io.BytesIO()
    np.save(buffer, np.array([Evil(mark)], dtype=object), allow_pickle=True)
    return {**found, "numpy": buffer.getvalue()}


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of any header: JSON, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def broken_safetensors(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield files that are no safetensors files, or lie about themselves, made of one that is."""
    (size,) = struct.unpack("<Q", whole[:8])
    for cut in (0, 4, 8, 9, 8 + size // 2, 8 + size - 1, 8 + size, 8 + size + 5, len(whole) - 1):
        yield f"cut at {cut}", whole[:cut]
    for length in (0, 1, size - 1, size + 1, len(whole), 100_000_000, 2**31, 2**63, 2**64 - 1):
        yield f"header of {length}", struct.pack("<Q", length) + whole[8:]
    yield "bytes after the end", whole + b"\0" * 8
    for name, entry in {
        "offsets beyond the end": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]},
        "offsets backwards": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        "negative offsets": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        "a shape of other bytes": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]},
        "a shape that overflows": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 16]},
        "a negative shape": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        "no kind of number": {"dtype": "F31", "shape": [4], "data_offsets": [0, 16]},
        "no shape": {"dtype": "F32", "data_offsets": [0, 16]},
    }.items():
        yield name, safetensors({"x": entry}, b"\0" * 16)
    same = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    yield "overlapping offsets", safetensors({"x": same, "y": same}, b"\0" * 16)
    yield "a hole", safetensors({"x": {**same, "data_offsets": [16, 32]}}, b"\0" * 32)
    for text in (b"[]", b"null", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"", b'{"__metadata__": 3}'):
        yield f"header {text[:10]!r}", safetensors(text, b"\0" * 16)


@st.composite
def mutated(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file with one to three changes: bytes removed, put in, repeated or replaced, or the rest cut off."""
    content = whole
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(content)))
        end = min(begin + draw(st.integers(0, 40)), len(content))
        middle = draw(
            st.sampled_from([b"", content[begin:end] * 2, *TOKENS]) | st.binary(max_size=8) | st.just(content[:begin])
        )
        content = content[:begin] + middle + (b"" if draw(st.integers(0, 9)) == 0 else content[end:])
    return content
