"""The command: its verbs, and what becomes of errors. Nothing heavy is imported before a verb is chosen."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
import warnings
from typing import Annotated, Any

import typer

from lopsided import __version__
from lopsided.cli import compare, look, report, reproduce, train, use
from lopsided.cli.output import StoppedError
from lopsided.errors import LopsidedError, SaidError, is_out_of_memory, sentence
from lopsided.progress import printable

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
_NAMES = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR}

_LONGEST = 2000
"""The most characters of an error that are printed."""

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
    """Learn from images of which one class is rare, and say how sure the result is.

    \b
    Examples:
      lopsided demo                       see it work on embedded images
      lopsided fit photos --out run       train on one sub-folder per class
      lopsided evaluate run new-photos    figures on other labelled images
      lopsided predict run inbox --out answers.csv
      lopsided export run --to onnx
      lopsided report run --open          look at its mistakes
      lopsided compare photos --arms weighted-ce,cl,afcl --seeds 3 --out CMP
      lopsided reproduce eta --out sweep --quick
    """


for verb in (
    train.demo,
    train.fit,
    use.evaluate,
    use.predict,
    use.export,
    compare.compare,
    report.report,
    reproduce.reproduce,
    look.recipes,
    look.losses,
    look.data,
    look.doctor,
):
    app.command()(verb)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; errors a user can repair end with their sentence and exit code 2, interruptions with 130."""
    code = run(arguments)
    if code and _is_joined():
        # An error left the group of ranks as it was. A rank has been seen to end by SIGABRT here, presumably while the
        # group was taken apart, and the launcher then told of a signal instead of the exit code.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_joined() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def run(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    _open_streams()
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        with warnings.catch_warnings():
            # What Pillow says of damaged metadata, forty lines for one TIFF, helps nobody; errors have their sentence.
            warnings.filterwarnings("ignore", module=r"PIL\.")
            code = app(arguments, prog_name="lopsided", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return _end(error)
    if code == 130:  # What typer makes of a KeyboardInterrupt.
        return _end(KeyboardInterrupt())
    if not arguments:  # The help has been printed; click before 8.2 regards that as a success.
        return 2
    return code if isinstance(code, int) else 0


def _open_streams() -> None:
    """See that any text can be printed.

    A stream that was closed is replaced by nowhere: the next file would get its number. What an encoding does not have
    is written as an escape sequence, but on a stdout of UTF-8 the name of a file that is not UTF-8 stays what it is.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  It is open until the end.
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            exact = name == "stdout" and codecs.lookup(stream.encoding).name == "utf-8"
            stream.reconfigure(errors="surrogateescape" if exact else "backslashreplace")


def _end(error: BaseException) -> int:
    """Say what went wrong in one sentence, and return the exit code that belongs to it."""
    if isinstance(error, BrokenPipeError):
        _silence_stdout()  # Whoever read the output has seen enough.
        return 1
    if type(error).__name__ == "NoArgsIsHelpError":  # The help has been printed.
        return 2
    rank = os.environ.get("RANK", "0")
    # Every rank has the same arguments, and so the same to say of them.
    quiet = isinstance(error, SaidError) or (_is_usage(error) and rank != "0")
    if isinstance(error, SaidError) and error.__cause__ is not None:
        error = error.__cause__
    text, code = f"{error}", 2
    if isinstance(error, StoppedError):
        code = 130
    elif isinstance(error, KeyboardInterrupt | typer.Abort):
        text, code = "interrupted.", 130
    elif _is_usage(error):
        text = f"{_usage_text(error)} {_usage_help(error)}"
    elif is_out_of_memory(error):
        text = _memory_text(error)
    elif isinstance(error, OSError) and (told := _system_text(error)):
        text = told
    elif not isinstance(error, LopsidedError):
        reason = " ".join(str(error).split())
        told = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        text, code = f"something unexpected happened ({told}). Set LOPSIDED_TRACEBACK=1 to see where.", 1
    if os.environ.get("LOPSIDED_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    if not quiet:
        who = "lopsided" if rank == "0" else f"lopsided, rank {rank}"
        print(f"{who}: {printable(_cut(text))}", file=sys.stderr)
    return code


def _memory_text(error: BaseException) -> str:
    got = " ".join(str(error).split())[:200] or "no more of it"
    do = "Take a smaller batch, image size or encoder, or encoder_training.chunk_size."
    return sentence("the work must fit into the memory of this machine", got, do)


def _system_text(error: OSError) -> str:
    """Say what the system said of a disk or a name; nothing if it is something else."""
    what = f"{os.fsdecode(error.filename or 'the output')} ({error.strerror})"
    if error.errno in _DISK:
        if error.filename is None:  # It was printed: the last flush would fail once more.
            _silence_stdout()
        return sentence("the disk must be writable and have room", what)
    if error.errno in _NAMES and error.filename is not None:
        return sentence("a path must be one that this system can open", what)
    if error.errno == errno.ENOENT and not _has_folder():
        return sentence("the working folder must be there", "one that was removed", "Change to another folder.")
    return ""


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _cut(text: str) -> str:
    """Leave out the middle of what is very long: a name that someone made up can be of any length."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\N{HORIZONTAL ELLIPSIS}{text[-_LONGEST // 4 :]}"


def _is_usage(error: BaseException) -> bool:
    # The class lies in click or, since typer 0.26, in typer's own copy of it; its face is the same.
    return hasattr(error, "format_message") and getattr(error, "exit_code", None) == 2


def _usage_text(error: Any) -> str:
    text = " ".join(str(error.format_message()).split())
    return text if text.endswith((".", "?")) else f"{text}."


def _usage_help(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"See `{context.command_path if context else 'lopsided'} --help`."


def _silence_stdout() -> None:
    """Point stdout nowhere, so that the interpreter's last flush does not fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
