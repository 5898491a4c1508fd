"""Pages that are written from the package itself, and a table of contents with pages that may be missing.

``reference/generated/`` holds the pages on the command, the fields of a recipe and the losses. They are written anew
for every build, so that they cannot differ from what the package does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive ``pages``, and write the generated pages before Sphinx looks for documents."""
    app.add_directive("pages", Pages)
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Pages(TocTree):
    """A ``toctree`` in which an entry that ends with ``?`` is left out if there is no such page."""

    def run(self) -> list[Any]:
        """Leave out the entries without a page, and continue as a ``toctree``."""
        folder = Path(self.env.doc2path(self.env.current_document.docname)).parent
        kept = [line.rstrip("?") for line in self.content if not line.endswith("?") or _is_page(folder, line[:-1])]
        self.content = StringList(kept, source="pages")
        return super().run() if kept else []


def _is_page(folder: Path, name: str) -> bool:
    return (folder / f"{name}.md").is_file()


def _write(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "reference" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in written().items():
        text = "\n".join(lines) + "\n"
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:  # An equal page need not be read again.
            path.write_text(text, encoding="utf-8")


def written() -> dict[str, list[str]]:
    """Return the lines of each page that is written from the package."""
    return {"command.md": [*_command()], "recipe.md": [*_recipe()], "losses.md": [*_losses()]}


# --- The command ---


def _command() -> Iterator[str]:
    from lopsided.cli.app import app

    yield "# The command"
    yield ""
    yield "This page is written from the command itself when the site is built. `lopsided VERB --help` prints the same."
    yield ""
    yield from _help(app.registered_callback.callback.__doc__)
    for command in app.registered_commands:
        verb = command.callback
        arguments, panels = _parameters(verb)
        yield from ("", f"## lopsided {verb.__name__}", "")
        yield from ("```text", " ".join(["lopsided", verb.__name__, "[OPTIONS]", *arguments]), "```", "")
        yield from _help(verb.__doc__)
        for panel, rows in panels.items():
            yield from (f"**{panel}**", "", "| | value | default | |", "|---|---|---|---|", *rows, "")


def _help(text: str | None) -> Iterator[str]:
    """The help of a verb: paragraphs, and the examples as a block of commands."""
    for part in re.split(r"\n\s*\n", (text or "").strip()):
        if part.lstrip().startswith("\b"):
            first, *lines = [line.strip() for line in part.replace("\b", "").splitlines() if line.strip()]
            yield from (first, "", "```sh", *lines, "```", "")
        else:
            yield from (_prose(part), "")


def _prose(text: str) -> str:
    """One line, with options and folders such as RUN/comparison as code, so that their dashes stay dashes."""
    return re.sub(r"(?<![\w`])(--[a-z][\w-]*|[A-Z]{3,}/\S+)", r"`\1`", " ".join(text.split())).replace("|", "\\|")


def _parameters(verb: Any) -> tuple[list[str], dict[str, list[str]]]:
    """The arguments of the usage line, and the rows of each panel of the help, from the signature of a verb."""
    from typer.models import ArgumentInfo

    hints = get_type_hints(verb, include_extras=True)
    arguments, panels = [], {"Arguments": [], "Options": []}
    for name, parameter in inspect.signature(verb).parameters.items():
        kind, info = get_args(hints[name])[:2]
        is_required = parameter.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            shown = info.metavar or name.upper()
            arguments.append(shown if is_required else f"[{shown}]")
            panel, value, names = "Arguments", "required" if is_required else "", f"`{shown}`"
        else:
            # In Annotated, typer takes the first name for a default.
            declared = [text for text in (info.default, *(info.param_decls or ())) if str(text).startswith("-")]
            names = ", ".join(f"`{text}`" for text in declared or [f"--{name.replace('_', '-')}"])
            panel, value = info.rich_help_panel or "Options", _value(kind, info, name)
        default = "" if parameter.default in (inspect.Parameter.empty, None, False) else f"`{parameter.default}`"
        panels.setdefault(panel, []).append(f"| {names} | {value} | {default} | {_prose(info.help or '')} |")
    return arguments, {panel: rows for panel, rows in panels.items() if rows}


def _value(kind: Any, info: Any, name: str) -> str:
    """The kind of an option's value; nothing for a switch."""
    if info.metavar:
        return f"`{info.metavar}`"
    kinds = [each for each in (get_args(kind) or (kind,)) if each is not type(None)]
    words = {bool: "", str: "text", int: "integer", float: "number", Path: "path"}
    word = words.get(kinds[0], "text" if kinds[0] is not list and get_origin(kinds[0]) is None else "text, repeated")
    return word if info.min is None else f"{word} >= {info.min:g}"


# --- The recipe ---


def _recipe() -> Iterator[str]:
    from lopsided.recipe import named_recipes
    from lopsided.recipe.schema import Recipe
    from lopsided.recipe.sections import RUNTIME_FIELDS
    from lopsided.recipe.words import leaves

    recipe = Recipe()
    yield "# The fields of a recipe"
    yield ""
    yield (
        "This page is written from the schema when the site is built. A recipe is a TOML file; `lopsided fit DATA "
        "NAME=VALUE` sets any of these fields. The default is that of the recipe `from-scratch`, which a missing field "
        "takes. `lopsided recipes NAME` prints a recipe with the fields that have an effect on it."
    )
    yield from ("", "## The recipes of the package", "", "| name | purpose |", "|---|---|")
    for name, purpose in named_recipes().items():
        yield f"| `{name}` | {purpose} |"
    section = None
    yield from ("", "## Fields of the whole run", "")
    yield from _FIELD_HEAD
    for path, field, value in leaves(recipe):
        table, _, name = path.rpartition(".")
        if table and table != section:
            section = table
            yield from ("", f"## [{table}]", "", _purpose(recipe, table), "")
            yield from _FIELD_HEAD
        note = " It is not part of the hash of a recipe." if path in RUNTIME_FIELDS else ""
        yield f"| `{name}` | {_toml(value)} | {_cell(field.description)}{note} | {_accepted(recipe, path)} |"


_FIELD_HEAD = ("| field | default | meaning | accepts |", "|---|---|---|---|")


def _purpose(recipe: Any, table: str) -> str:
    if table.endswith(".loss"):
        return "A loss has a table of its own: its name, and the parameters of [that loss](losses.md)."
    return _cell(type(getattr(recipe, table)).__doc__)


def _accepted(recipe: Any, path: str) -> str:
    from lopsided.recipe.words import phrase_of

    owner: Any = recipe
    *tables, name = path.split(".")
    for table in tables:
        owner = getattr(owner, table)
    return _cell(phrase_of(type(owner), name))


def _toml(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


# --- The catalogue of losses ---


def _losses() -> Iterator[str]:
    from lopsided.losses import catalogue

    yield "# The losses of the command"
    yield ""
    yield (
        "This page is written from the catalogue when the site is built; `lopsided losses` prints the same. Equations "
        "are on the page [losses with equations](../losses.md), the published figures on [the losses of the "
        "field](../../losses.md#the-losses-of-the-field)."
    )
    for name in catalogue.BUILT_IN:
        entry = catalogue.BUILT_IN[name]
        yield from ("", f"## {name}", "", f"{entry.title}. Kind: {entry.kind}.", "")
        if entry.parameters:
            yield from ("| parameter | default | meaning |", "|---|---|---|")
            for parameter in entry.parameters:
                yield f"| `{parameter.name}` | {_toml(parameter.default)} | {_cell(parameter.description)} |"
