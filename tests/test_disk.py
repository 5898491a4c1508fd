"""A disk that is full or read-only at any write: one sentence, nothing lost, and the same end once there is room.

``benchmarks/disk.py`` tries every write of every command in each way; here a part of them is tried.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from disk_faults import KINDS, Disk
from disk_jobs import OLD, TINY, Job, call, leftovers, make_jobs, run_content
from lopsided import files
from lopsided.errors import RunError
from tiny_command import environment, names_below

pytestmark = pytest.mark.slow

STEPS = {"fit": 11}
"""Of a run's writes one in so many is tried."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> dict[str, Job]:
    return make_jobs(folder / "data")


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict", "predict-readable", "report", "export"])
def test_a_command_that_the_disk_breaks_off_loses_nothing_and_ends_as_if_it_had_not_been(
    jobs: dict[str, Job], folder: Path, name: str
) -> None:
    job = jobs[name]
    job.learn(folder / "work")
    places = range(0, len(job.operations), STEPS.get(name, 1))
    said = [job.disturb(folder / "work", KINDS[i % 3], at) for i, at in enumerate(places)]
    assert len(said) >= 5
    assert all(said), "Every place was reached."


def test_a_sweep_that_the_disk_breaks_off_goes_on_to_the_same_records_and_tables(
    jobs: dict[str, Job], folder: Path
) -> None:
    job = jobs["reproduce"]
    job.learn(folder / "work")
    in_records = next(i for i, what in enumerate(job.operations) if what == "write sweep/records.jsonl")
    for kind, at in (("once", in_records), ("full", len(job.operations) - 2)):
        assert job.disturb(folder / "work", kind, at)


def test_the_wrapper_refuses_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with Disk(tmp_path, "full", at=1), pytest.raises(OSError, match="No space left"):
        path.write_bytes(b"12345678")
    assert path.read_bytes() == b"1234", "Half of it, as on a disk that fills up."
    with Disk(tmp_path, "full", at=0):
        path.unlink()
    path.write_bytes(b"")
    with Disk(tmp_path, "read-only", at=0) as disk:
        with pytest.raises(OSError, match="Read-only"):
            (tmp_path / "folder").mkdir()
        with pytest.raises(OSError, match="Read-only"):
            path.unlink()
        assert path.read_bytes() == b""
    assert (disk.refused, path.exists()) == (2, True)


def test_a_file_that_is_not_wanted_in_the_end_is_removed_with_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    for number in (1, 0):
        with files.replacing(path, wanted=lambda: number > 0) as temporary:  # noqa: B023  It is called in the block.
            temporary.write_text("a\n")
        assert path.exists() == (number > 0)
    assert names_below(tmp_path) == []


def test_an_error_of_the_disk_is_not_hidden_by_what_cannot_be_removed_then(jobs: dict[str, Job], folder: Path) -> None:
    job = jobs["fit"]
    job.learn(folder / "work")
    in_log = next(i for i, what in enumerate(job.operations) if what == "write run/log.jsonl")
    said = job.disturb(folder / "work", "read-only", in_log)
    assert said.startswith(f"lopsided: cannot write {folder / 'work' / 'run' / 'log.jsonl'}: read-only")


# A real disk


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[tuple[Path, Callable[[str], bool]]]:
    """Yield a folder on a disk of so many bytes, and a function that mounts it otherwise ("size=8m", "ro", "rw").

    Where nothing may be mounted, no file may be larger than a part of that, which the system refuses as it does on a
    full disk (EFBIG); the folder's permissions stand for "ro", which bind everyone but the superuser.
    """
    folder.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if mounted:
        tried = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        mounted = subprocess.run(tried, capture_output=True, check=False).returncode == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def change(how: str) -> bool:
        if mounted:
            subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)
        elif how.startswith("size"):
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        else:
            folder.chmod(0o755 if how == "rw" else 0o555)
        return mounted or how.startswith("size") or os.geteuid() != 0

    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 8, before[1]))
    try:
        yield folder, change
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)
        else:
            folder.chmod(0o755)


def test_a_fit_on_a_disk_that_is_really_full_goes_on_when_there_is_room(
    jobs: dict[str, Job], folder: Path, tmp_path: Path
) -> None:
    photos = folder / "data" / "photos"
    arguments = ["fit", photos, *TINY, "--quiet", "--out"]
    assert call(*arguments, tmp_path / "undisturbed").code == 0
    with small_disk(tmp_path / "small", 96 * 1024) as (disk, change):
        ended = call(*arguments, disk / "run")
        assert ended.code == 2
        assert ended.err.endswith("no space left on device. Free some disk space.\n")
        assert leftovers(disk) == []
        change("size=16m")
        ended = call(*arguments, disk / "run", "--resume")
        assert ended.code == 0, ended.err
        assert run_content(disk / "run") == run_content(tmp_path / "undisturbed")


def test_a_folder_that_is_really_read_only_is_one_sentence_and_keeps_its_files(
    jobs: dict[str, Job], folder: Path, tmp_path: Path
) -> None:
    run, inbox = folder / "data" / "run", folder / "data" / "inbox"
    with small_disk(tmp_path / "small", 1 << 20) as (disk, change):
        (disk / "answers.csv").write_bytes(OLD)
        # The superuser writes where no permission is; where it may not mount either, the wrapper refuses in its place.
        with nullcontext() if change("ro") else Disk(disk, "read-only", at=0):
            predicted = call("predict", run, inbox, "--out", disk / "answers.csv", "--quiet")
            fitted = call("fit", folder / "data" / "photos", *TINY, "--quiet", "--out", disk / "run")
        assert (predicted.code, fitted.code) == (2, 2)
        assert f"lopsided: cannot write {disk / 'answers'}" in predicted.err
        assert f"cannot create the folder {disk / 'run'} (" in fitted.err
        assert names_below(disk) == ["answers.csv"]
        assert (disk / "answers.csv").read_bytes() == OLD


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="This system has no /dev/full; Linux has.")
def test_an_output_that_is_full_is_one_sentence_and_code_2() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "lopsided", "recipes"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            check=False,
        )
    do = "Free some disk space or choose a writable folder."
    expected = f"lopsided: cannot write the output (No space left on device). {do}\n"
    assert (ended.returncode, ended.stderr) == (2, expected)


def test_a_lock_of_any_content_is_taken_over(tmp_path: Path) -> None:
    for content in (b"", b"[" * 4096, b'{"pid": 1e999, "host": "x"}', b'{"pid": {}, "host": 3}', b"\xff\xfe\0"):
        (tmp_path / files.LOCK_NAME).write_bytes(content)
        with files.lock(tmp_path), pytest.raises(RunError, match=r"in use by process \d+ on"), files.lock(tmp_path):
            pass
    assert not (tmp_path / files.LOCK_NAME).exists()
