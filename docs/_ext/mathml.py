"""Equations as MathML, which browsers draw themselves: no script, no font and no network is needed to read a page."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer ``mathml``."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _mathml(node: nodes.Element, *, block: bool) -> str:
    try:
        return tex2mathml(node.astext(), as_block=block)
    except Exception as error:
        what = f"The equation {node.astext()!r} must be one that docutils can write as MathML: {error}"
        raise ExtensionError(what) from error


def _inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(f'<span class="math notranslate">{_mathml(node, block=False)}</span>')
    raise nodes.SkipNode


def _block(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math notranslate"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})</span>')
    self.body.append(_mathml(node, block=True))
    self.body.append("</div>\n")
    raise nodes.SkipNode
