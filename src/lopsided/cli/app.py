"""The command line: subcommands and error handling. Heavy modules are imported only by the subcommand that runs."""

from __future__ import annotations

import codecs
import contextlib
import difflib
import errno
import io
import os
import signal
import sys
import threading
import warnings
from functools import cache as cached
from typing import Annotated, Any

import typer

from lopsided import __version__
from lopsided.cli import (
    cache,
    compare,
    demo,
    evaluate,
    export,
    find,
    look,
    predict,
    report,
    reproduce,
    serve,
    settings,
    train,
)
from lopsided.cli.output import StoppedError, begin, process_age
from lopsided.errors import LopsidedError, SaidError, is_out_of_memory
from lopsided.runs.progress import printable
from lopsided.stopping import STOPPING

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
_NAMES = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR}

_LONGEST = 2000
"""The maximum number of characters of a printed error."""

app = typer.Typer(
    name="lopsided",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lopsided {__version__}")
        raise typer.Exit


@app.callback()
def lopsided(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train an image classifier when one class is rare, and know how far to trust it.

    \b
    Examples:
      lopsided demo                       try it on the included images
      lopsided fit photos                 train; one sub-folder per class
      lopsided report --open              show the mistakes of the newest run
      lopsided evaluate new-photos        evaluate on other labelled images
      lopsided predict inbox --out answers.csv
      lopsided find archive --class melanoma --out found.csv
      lopsided serve --open               a page to try the newest run
      lopsided export --to onnx
      lopsided predict runs/1 inbox       use this run
      lopsided compare photos --methods "quick, ce, afcl" --folds 5 --out CMP
      lopsided reproduce eta --out sweep --quick
    """


for verb in (
    demo.demo,
    train.fit,
    evaluate.evaluate,
    predict.predict,
    find.find,
    export.export,
    compare.compare,
    report.report,
    serve.serve,
    reproduce.reproduce,
    look.recipes,
    look.losses,
    look.data,
    cache.cache,
    look.doctor,
):
    app.command()(verb)
app.command("train", hidden=True)(train.fit)  # The word that other programs use.


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit.

    A user error prints one line and exits with code 2, an interruption with code 130. SIGTERM, with which clusters end
    a job, interrupts as the keyboard does, so that locks are released, but a step of training is finished and saved
    first. It exits with code 143.
    """
    signal.signal(signal.SIGTERM, _terminate)
    let_threads_sleep()
    code = run(arguments, process_age())
    is_rank = "torch.distributed" in sys.modules and os.environ.get("WORLD_SIZE", "1") != "1"
    if is_rank or (code in (130, 143) and _is_decoding()):
        # A normal exit was seen to end one rank in ten with SIGABRT, after success and after errors: a thread of torch
        # is still there when it is taken apart. The launcher then ended the other ranks, which were still writing.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def let_threads_sleep() -> None:
    """Let threads that wait for each other sleep instead of spin, if other programs use all cores already.

    OpenMP reads this once, when torch is imported. What the user set stays (benchmarks/waiting.py).
    """
    is_set = any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
    if not is_set and hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1):
        os.environ["OMP_WAIT_POLICY"] = "passive"


_terminations: list[int] = []
"""Holds SIGTERM once it has come."""


def _terminate(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # Cleaning up must not be interrupted.
    _terminations.append(number)
    STOPPING.request()


def _is_decoding() -> bool:
    """Return whether threads decode images, which a normal exit waits for. Some decoders cannot be interrupted."""
    images = sys.modules.get("lopsided.data.images")
    return images is not None and any(thread.name.startswith(images.DECODING) for thread in threading.enumerate())


@cached
def _command() -> Any:
    """Return the command that typer makes of all signatures, which takes as long as some of the verbs."""
    return typer.main.get_command(app)


def run(arguments: list[str] | None = None, age: float = 0.0) -> int:
    """Run the command and return its exit code. ``age`` is the time that the process has already taken."""
    begin(age)
    _open_streams()
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        with warnings.catch_warnings():
            # Pillow prints up to forty warnings for one TIFF with damaged metadata. Real errors are reported anyway.
            warnings.filterwarnings("ignore", module=r"PIL\.")
            code = _called(arguments)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return _end(error, arguments)
    if code == 130:  # typer returns this code for a KeyboardInterrupt.
        return _end(KeyboardInterrupt())
    if not arguments:  # The help was printed. click before 8.2 returns 0 in this case.
        return 2
    return code if isinstance(code, int) else 0


def _called(arguments: list[str]) -> Any:
    """Call the command. An option that it does not have, but that is called like a setting, is read as its word."""
    try:
        return _command()(arguments, prog_name="lopsided", standalone_mode=False)
    except Exception as error:
        option = _unknown_option(error, arguments)
        if option is None or settings.other_option(option, arguments) is not None:
            raise
        words = settings.with_word(option, arguments)
        if words is None:
            raise
    return _called(words)


def _open_streams() -> None:
    """Set up stdout and stderr so that any text can be printed.

    A closed stream is replaced by the null device; otherwise the next opened file would get its descriptor. Characters
    that the encoding lacks are written as escape sequences. On a stdout of UTF-8 or ASCII, which the C locale has, they
    are written as the bytes that they have in names of files: other programs read it, and a name must match its file.
    """
    codecs.register_error("lopsided-names", _name_bytes)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  It stays open until the process ends.
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            exact = name == "stdout" and codecs.lookup(stream.encoding).name in ("utf-8", "ascii")
            stream.reconfigure(errors="lopsided-names" if exact else "backslashreplace")


def _name_bytes(error: UnicodeError) -> tuple[bytes | str, int]:
    """Return the bytes of characters that an encoding lacks as names of files have them, or else escape sequences."""
    assert isinstance(error, UnicodeEncodeError)
    try:
        return os.fsencode(error.object[error.start : error.end]), error.end
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(error)


def _end(error: BaseException, arguments: list[str] | None = None) -> int:
    """Print the error on one line and return the exit code. ``arguments`` are those of the command."""
    if isinstance(error, BrokenPipeError):
        _silence_stdout()  # The reader of the pipe closed it.
        return 1
    if type(error).__name__ == "NoArgsIsHelpError":  # The help was printed.
        return 2
    rank = os.environ.get("RANK", "0")
    # All ranks have the same arguments, so only rank 0 prints a usage error.
    quiet = isinstance(error, SaidError) or (_is_usage(error) and rank != "0")
    if isinstance(error, SaidError) and error.__cause__ is not None:
        error = error.__cause__
    text, code = f"{error}", 2
    stopped = 128 + _terminations[0] if _terminations else 130
    if isinstance(error, StoppedError):
        code = stopped
    elif isinstance(error, KeyboardInterrupt | typer.Abort):
        text, code = "interrupted.", stopped
    elif _is_usage(error):
        told = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
        told += "" if told.endswith((".", "?")) else "."
        text = _other_text(error, arguments or []) or f"{told} {_usage_help(error)}"
    elif is_out_of_memory(error):
        text = _memory_text(error)
    elif isinstance(error, OSError) and (told := _system_text(error)):
        text = told
    elif not isinstance(error, LopsidedError):
        reason = " ".join(str(error).split())
        told = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        text, code = f"unexpected error ({told}). Set LOPSIDED_TRACEBACK=1 to see the traceback.", 1
    if os.environ.get("LOPSIDED_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    if not quiet:
        who = "lopsided" if rank == "0" else f"lopsided, rank {rank}"
        if len(text) > _LONGEST:  # A name in a message can have any length.
            text = f"{text[: _LONGEST // 2]}\N{HORIZONTAL ELLIPSIS}{text[-_LONGEST // 4 :]}"
        print(f"{who}: {printable(text)}", file=sys.stderr)
    return code


def _memory_text(error: BaseException) -> str:
    reason = " ".join(str(error).split())[:200]
    what = f"not enough memory ({reason})" if reason else "not enough memory"
    if isinstance(error, ImportError):
        return f"{what}. Close other programs, or raise the limit of this process."
    return f"{what}. Reduce the batch size, the image size or encoder_training.chunk_size, or use a smaller encoder."


def _system_text(error: OSError) -> str:
    """Return the message for a disk error or a bad path, or an empty text for any other error."""
    what, reason = os.fsdecode(error.filename or "the output"), error.strerror
    if error.errno in _DISK:
        if error.filename is None:  # Printing failed, and the final flush would fail again.
            _silence_stdout()
        return f"cannot write {what} ({reason}). Free some disk space or choose a writable folder."
    if error.errno in _NAMES and error.filename is not None:
        return f"cannot open {what} ({reason}). Check the path."
    if error.errno == errno.ENOENT and not _has_folder():
        return "the working folder no longer exists. Change to another folder."
    return ""


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _is_usage(error: BaseException) -> bool:
    # The class comes from click or, since typer 0.26, from typer's own copy of click. Both have these attributes.
    return hasattr(error, "format_message") and getattr(error, "exit_code", None) == 2


def _unknown_option(error: Any, arguments: list[str]) -> str | None:
    """Return the option that does not exist, if an error says so of a command whose settings are words."""
    is_setting = arguments[:1] in (["fit"], ["train"], ["compare"]) and hasattr(error, "possibilities")
    return getattr(error, "option_name", None) if is_setting else None


def _other_text(error: Any, arguments: list[str]) -> str:
    """Return the message for an option that another command has or that is like a field, or else an empty text."""
    from lopsided.recipe.changes import near_fields

    if (option := _unknown_option(error, arguments)) is None:
        return ""
    if other := settings.other_option(option, arguments):
        return f"There is no option {option}. Write {other}."
    fields = [f"--{name}".replace("_", "-") for name in near_fields(option.lstrip("-").replace("-", "_"))]
    near = difflib.get_close_matches(option, [*(error.possibilities or ()), *fields], n=1)
    return f"No such option: {option}. Did you mean {near[0]}? {_usage_help(error)}" if near else ""


def _usage_help(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"See `{context.command_path if context else 'lopsided'} --help`."


def _silence_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter's final flush does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
