"""Equations as MathML, made by docutils when the site is built: no script, no fonts, and browsers draw it themselves."""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)


def convert(node: nodes.Element, as_block: bool) -> str:
    """The equation of a node; what docutils cannot read is a warning, and an error of a strict build."""
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        logger.warning("equation %r: %s", node.astext(), error, location=node)
        return ""


def visit_inline(writer: Any, node: nodes.math) -> None:
    """`$x$` in a line of text."""
    writer.body.append(convert(node, as_block=False))
    raise nodes.SkipNode


def visit_block(writer: Any, node: nodes.math_block) -> None:
    """`$$ … $$` on lines of its own, which may scroll on a narrow screen."""
    writer.body.append(f'<div class="math-block">{convert(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
