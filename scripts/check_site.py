"""Check the built pages: every link inside the site must lead somewhere, and no page may ask another host for anything.

    python scripts/check_site.py build/site

Sphinx checks the links that it makes itself. This looks at the pages as a browser does: links of raw HTML, pictures,
scripts and styles, and the anchors that links name.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("source", "src"), ("link", "href"), ("iframe", "src"), ("object", "data")}
"""Attributes that a browser loads without a click."""
HARMLESS = {"canonical", "license", "prev", "next", "index", "search", "author"}
"""Kinds of ``link`` that a browser does not load."""


class Page(HTMLParser):
    """The anchors and the links of a page. Each link has the attribute that holds it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str, bool]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what a tag names and what it leads to."""
        values = dict(attrs)
        self.anchors |= {str(values[name]) for name in ("id", "name") if values.get(name)}
        for name, value in attrs:
            if name in ("href", "src", "data") and value and tag != "input":
                is_loaded = (tag, name) in LOADED and str(values.get("rel")) not in HARMLESS
                self.links.append((f"<{tag} {name}>", value, is_loaded))


def problems(folder: Path) -> list[str]:
    """Return a sentence for each link that leads nowhere and for each file that is loaded from another host."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        for where, link, is_loaded in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if is_loaded and parts.scheme != "data":
                    found.append(f"{name}: {where} loads {link} from another host.")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{name}: {where} leads to {link}, which is not there.")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {where} leads to {link}, but that page has no such anchor.")
    for style in sorted(folder.rglob("*.css")):
        text = style.read_text(encoding="utf-8")
        if "url(http" in text or "url(//" in text or "@import" in text:
            found.append(f"{style.relative_to(folder)}: it loads a file from another host.")
    return found


def main() -> int:
    """Print the problems of the site in the folder, and return 1 if there are any."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("The folder of the built site must be given: python scripts/check_site.py build/site", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    found = problems(folder)
    print("\n".join(found) or f"{len(list(folder.rglob('*.html')))} pages: every link leads somewhere.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
