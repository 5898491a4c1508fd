from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forked import BENCHMARKS
from lopsided import files
from lopsided.errors import RunError
from lopsided.files import (
    append_line,
    atomic_write,
    check_free,
    lock,
    make_folder,
    remove_left_lock,
    remove_leftovers,
    replacing,
)

HOLD = """
import sys, time
from lopsided.files import lock
with lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_half(path: Path) -> None:
    path.write_text("half of the n")
    raise RuntimeError("power")


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    atomic_write(path, "old")
    atomic_write(path, "größer")
    assert path.read_text(encoding="utf-8") == "größer"
    atomic_write(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["metrics.json"]


def test_a_write_that_breaks_leaves_the_old_content_and_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    atomic_write(path, "old")
    with pytest.raises(RuntimeError, match="power"), replacing(path) as temporary:
        write_half(temporary)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["model.onnx"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.ENOSPC, "no space left on device. Free some disk space."),
        (errno.EDQUOT, "disk quota exceeded. Free some disk space."),
        (errno.EROFS, "read-only file system. Choose another folder or change its permissions."),
        (errno.EACCES, "permission denied. Choose another folder or change its permissions."),
    ],
)
def test_what_the_disk_refuses_is_one_sentence_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    path = tmp_path / "model.safetensors"
    atomic_write(path, "old")

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "_flush", refuse)
    with pytest.raises(RunError) as caught:
        atomic_write(path, "new")
    assert str(caught.value).startswith(f"cannot write {path}: {text}")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["model.safetensors"]


def test_a_full_disk_is_named_when_a_line_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_RDWR)
    monkeypatch.setattr(files, "_open_plain", lambda *_: full)
    with pytest.raises(RunError, match=r"^cannot write .*log\.jsonl: no space left on device\."):
        append_line(tmp_path / "log.jsonl", "{}")


def test_a_file_below_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(RunError, match=r"^cannot write .*run/metrics\.json: not a directory\."):
        atomic_write(tmp_path / "run" / "metrics.json", "x")
    with pytest.raises(RunError, match=r"^cannot write .*run: file exists\."):
        make_folder(tmp_path / "run")


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "link to a device"])
def test_what_is_no_ordinary_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device" or os.geteuid():
        path.symlink_to("/dev/null")
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:  # Not every container may.
            path.symlink_to("/dev/null")
    before = os.lstat(path)
    with pytest.raises(RunError, match=r"^cannot replace .*out: it is a .+\. Choose another name\."):
        atomic_write(path, "x")
    with pytest.raises(RunError, match=r"it is a "), replacing(path, wanted=lambda: False):
        pass
    after = os.lstat(path)  # Reading a link changes the time of its last access.
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    assert names(tmp_path) == ["out"]


def test_the_links_of_the_system_stay_whatever_they_lead_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "islink", lambda path: str(path) == "/dev/stdout")
    with pytest.raises(RunError, match=r"^cannot replace /dev/stdout: it is a system link"):
        files.check_replaceable("/dev/stdout")


def test_a_link_is_replaced_and_the_file_that_it_leads_to_is_not(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for name, there in (("link", "old"), ("dangling", "nothing")):
        (tmp_path / name).symlink_to(there)
        atomic_write(tmp_path / name, "new")
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_text() == "new"
    assert (tmp_path / "old").read_text() == "old"


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".model.json.123.tmp", ".hidden", "kept.tmp"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".hidden", "kept.tmp"]


DIE = """
import sys
sys.path.insert(0, sys.argv[1])
from kill import die_at_write
from lopsided.files import append_line, atomic_write, lock
folder, fatal = sys.argv[2:]
die_at_write(int(fatal), folder)
with lock(folder):
    atomic_write(f"{folder}/model.json", "new" * 100_000)
    append_line(f"{folder}/log.jsonl", "{}")
"""


@pytest.mark.slow
def test_a_process_killed_before_any_of_its_writes_leaves_whole_files_and_nothing_that_stays(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[1])}
    found, fatal, code = [], 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        fatal += 1
        folder = tmp_path / str(fatal)
        folder.mkdir()
        atomic_write(folder / "model.json", "old")
        command = [sys.executable, "-c", DIE, str(BENCHMARKS), str(folder), str(fatal)]
        code = subprocess.run(command, env=environment, check=False).returncode
        if code == -signal.SIGKILL:
            found.append((folder / "model.json").read_text())
            assert not (folder / "log.jsonl").exists() or (folder / "log.jsonl").read_text() in ("", "{}\n")
            with lock(folder):
                atomic_write(folder / "model.json", "newer")
            assert (folder / "model.json").read_text() == "newer"
            assert not [name for name in names(folder) if name.startswith(".")]
    assert code == 0
    switch = found.index("new" * 100_000)
    assert found == ["old"] * switch + ["new" * 100_000] * (len(found) - switch)
    # Opened and truncated, written and flushed, renamed; then the folder is flushed, the log opened, the lock removed.
    assert switch >= 5
    assert len(found) - switch >= 3


def test_two_who_write_a_file_at_once_leave_each_others_work_alone(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
            remove_leftovers(tmp_path)
            assert first.read_text() == "first"
        assert path.read_text() == "second"
        assert names(tmp_path) == [first.name, "answers.csv"]
    assert path.read_text() == "first"
    assert names(tmp_path) == ["answers.csv"]


def test_the_next_write_of_a_file_removes_what_was_left_of_it_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a[1].csv.77.tmp", ".a[1].csv.77-1.tmp", ".a1.csv.77.tmp", ".a[1].csv.mine.tmp"):
        (tmp_path / name).touch()
    atomic_write(tmp_path / "a[1].csv", "new")
    assert names(tmp_path) == [".a1.csv.77.tmp", ".a[1].csv.mine.tmp", "a[1].csv"]


def test_files_are_written_where_the_disk_knows_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> bool:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(files, "_try_lock", refuse)
    (tmp_path / ".model.json.1.tmp").touch()
    atomic_write(tmp_path / "model.json", "new")
    assert (tmp_path / "model.json").read_text() == "new"
    assert names(tmp_path) == [".model.json.1.tmp", "model.json"]


def test_lines_are_appended_after_a_torn_one_without_touching_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_line(path, "{}")
    with path.open("a") as file:
        file.write('{"loss": 0.')
    append_line(path, '{"event": "resumed"}')
    assert path.read_text() == '{}\n{"loss": 0.\n{"event": "resumed"}\n'


def test_a_line_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a line must not contain a line break"):
        append_line(tmp_path / "log.jsonl", "a\nb")


def test_a_lock_is_gone_after_the_block_even_if_that_raises(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="power"), lock(tmp_path / "run"):
        write_half(tmp_path / "run" / "log.jsonl")
    (tmp_path / "run" / "log.jsonl").unlink()
    assert names(tmp_path / "run") == []
    with lock(tmp_path / "run"):
        pass


def test_a_second_owner_is_refused_and_told_the_first(tmp_path: Path) -> None:
    with (
        lock(tmp_path),
        pytest.raises(RunError, match=rf"in use by process {os.getpid()} on .*\. Wait for it to end\."),
        lock(tmp_path),
    ):
        pass
    assert names(tmp_path) == []


def test_a_folder_is_checked_without_being_touched(tmp_path: Path) -> None:
    check_free(tmp_path / "not there")
    check_free(tmp_path)
    with (
        lock(tmp_path),
        pytest.raises(RunError, match=rf"in use by process {os.getpid()} on .*\. Wait for it to end\."),
    ):
        check_free(tmp_path)
    assert names(tmp_path) == []
    (tmp_path / files.LOCK_NAME).write_text("left behind by a crash")
    check_free(tmp_path)
    assert (tmp_path / files.LOCK_NAME).read_text() == "left behind by a crash"


def test_a_lock_that_a_crash_left_is_removed_and_one_that_is_held_is_not(tmp_path: Path) -> None:
    (tmp_path / files.LOCK_NAME).write_text("left behind by a crash")
    remove_left_lock(tmp_path)
    assert names(tmp_path) == []
    remove_left_lock(tmp_path / "not there")
    assert names(tmp_path) == []
    with lock(tmp_path):
        remove_left_lock(tmp_path)
        assert names(tmp_path) == [files.LOCK_NAME]


def test_an_owner_who_has_just_come_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lock(tmp_path):
        content = (tmp_path / files.LOCK_NAME).read_text()
        os.truncate(tmp_path / files.LOCK_NAME, 0)
        # The owner writes its name while the other waits.
        monkeypatch.setattr("time.sleep", lambda seconds: (tmp_path / files.LOCK_NAME).write_text(content))
        with pytest.raises(RunError, match=f"in use by process {os.getpid()} on"):
            check_free(tmp_path)


def test_the_lock_of_another_process_holds_until_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"in use by process {holder.pid} on"), lock(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert names(tmp_path) == [files.LOCK_NAME]
        with lock(tmp_path):
            pass
    assert names(tmp_path) == []


def lock_elsewhere(folder: Path, age: float = 0.0) -> Path:
    path = folder / files.LOCK_NAME
    path.write_text(json.dumps({"pid": 7, "host": "elsewhere.invalid"}))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_lock_of_another_machine_is_free_after_a_while_without_a_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lock_elsewhere(tmp_path)
    text = r"in use by process 7 on elsewhere\.invalid\. It is free 35 s after the last sign of that process\."
    for _ in range(2):
        with pytest.raises(RunError, match=text), lock(tmp_path):
            pass
    assert path.exists()
    monkeypatch.setattr(files, "STALE_SECONDS", 0.0)
    check_free(tmp_path)
    with lock(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert names(tmp_path) == []


def test_a_lock_of_another_machine_that_gave_its_last_sign_long_ago_is_free_at_once(tmp_path: Path) -> None:
    lock_elsewhere(tmp_path, age=3600)
    with lock(tmp_path):
        pass
    assert names(tmp_path) == []


def test_who_is_patient_notices_the_sign_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lock_elsewhere(tmp_path, age=100)
    monkeypatch.setattr("time.sleep", lambda seconds: os.utime(path))
    with pytest.raises(RunError, match=r"process 7 on elsewhere\.invalid\. Wait"), lock(tmp_path, patient=True):
        pass
    assert path.exists()


def test_a_held_lock_gives_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SIGN_SECONDS", 0.001)
    with lock(tmp_path):
        os.utime(path := tmp_path / files.LOCK_NAME, (0, 0))
        end = time.monotonic() + 60
        while not path.stat().st_mtime and time.monotonic() < end:
            time.sleep(0.001)
        assert path.stat().st_mtime > 0


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    text = r"^cannot lock .*: its file system has no file locks \(No locks available\)\. Write to a local disk and copy"
    with pytest.raises(RunError, match=text), lock(tmp_path):
        pass


def test_a_file_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    with (
        files.lock_output(tmp_path / "a.csv"),
        files.lock_output(tmp_path / "b.csv"),
        pytest.raises(RunError, match=rf"a\.csv is in use by process {os.getpid()} on .*\. Wait for it to end\."),
        files.lock_output(tmp_path / "a.csv"),
    ):
        pass
    assert names(tmp_path) == []


def test_a_lock_file_with_other_content_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / files.LOCK_NAME).write_text("not JSON")
    with lock(tmp_path):
        assert json.loads((tmp_path / files.LOCK_NAME).read_text())["pid"] == os.getpid()


# A folder may come from someone else: what is written into it must not land elsewhere


def test_a_line_is_not_appended_to_what_a_link_leads_to(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine\n")
    (tmp_path / "log.jsonl").symlink_to(mine)
    with pytest.raises(RunError, match="it is a symbolic link"):
        append_line(tmp_path / "log.jsonl", "theirs")
    with pytest.raises(RunError, match="it is a symbolic link"):
        files.cut(tmp_path / "log.jsonl", 0)
    assert mine.read_text() == "mine\n"


def test_a_lock_is_not_written_to_what_a_link_leads_to(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine\n")
    folder = make_folder(tmp_path / "run")
    (folder / ".lock").symlink_to(mine)
    with pytest.raises(RunError, match="it is a symbolic link"), lock(folder):
        raise AssertionError
    remove_left_lock(folder)
    check_free(folder)
    assert mine.read_text() == "mine\n"


def test_a_pipe_in_place_of_a_lock_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    check_free(tmp_path)
    with pytest.raises(RunError, match="not a regular file"), lock(tmp_path):
        raise AssertionError


def test_a_link_under_a_temporary_name_is_not_followed_and_goes(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.txt", make_folder(tmp_path / "run")
    for more in ("", "-1"):
        (folder / f".report.html.{os.getpid()}{more}.tmp").symlink_to(outside)
    with replacing(folder / "report.html") as temporary:
        assert not temporary.is_symlink()
        temporary.write_text("page")
    assert not outside.exists()
    assert names(folder) == ["report.html"]
    assert not (folder / "report.html").is_symlink()


def test_a_link_under_a_temporary_name_that_cannot_be_removed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside.txt"
    (tmp_path / f".a.{os.getpid()}.tmp").symlink_to(outside)
    monkeypatch.setattr(files, "remove_leftovers", lambda *_: None)
    atomic_write(tmp_path / "a", "content")
    assert (tmp_path / "a").read_text() == "content"
    assert not outside.exists()


def test_only_what_has_the_name_of_a_temporary_file_is_removed(tmp_path: Path) -> None:
    for name in (".notes.tmp", ".a.17.tmp", ".b.17-2.tmp"):
        (tmp_path / name).write_text("x")
    remove_leftovers(tmp_path, "a")
    assert names(tmp_path) == [".b.17-2.tmp", ".notes.tmp"]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".notes.tmp"]


def test_looking_whether_a_folder_is_free_does_not_keep_another_process_out(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(json.dumps({"pid": 999999999, "host": socket.gethostname()}))
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR)
    assert files._try_lock(descriptor)
    timer = threading.Timer(0.02, os.close, [descriptor])  # One who looks lets go within a moment.
    timer.start()
    try:
        check_free(tmp_path)
        (tmp_path / ".lock").write_text("")
        with lock(tmp_path):
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    finally:
        timer.join()


@pytest.mark.parametrize("moment", ["acquired", "signs"])
def test_an_interrupt_while_a_lock_is_taken_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def interrupted(*args: Any) -> Any:
        if moment == "acquired":
            acquired(*args)
        raise KeyboardInterrupt

    acquired = files._acquired
    monkeypatch.setattr(files, "_acquired" if moment == "acquired" else "_signs_of_life", interrupted)
    with pytest.raises(KeyboardInterrupt), files.lock(tmp_path / "run"):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_an_interrupt_does_not_remove_the_lock_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "_acquired", interrupted)
    lock = tmp_path / files.LOCK_NAME
    lock.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    with pytest.raises(KeyboardInterrupt), files.lock(tmp_path):
        pass
    assert lock.exists()
