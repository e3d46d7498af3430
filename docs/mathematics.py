"""Convert the formulas of the site to MathML when it is built, so that pages need no script and no network access."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
BLOCK = '<div class="formula" tabindex="0">{}</div>'
"""A formula that is wider than the page is scrolled, with the keyboard, too."""


def on_page_content(html: str, **_: Any) -> str:
    """Convert the formulas of one page. MkDocs calls this with the HTML of every page."""
    html = DISPLAY.sub(lambda found: BLOCK.format(convert(unescape(found[1]), display="block")), html)
    return INLINE.sub(lambda found: convert(unescape(found[1])), html)
