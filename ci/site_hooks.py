"""A hook of mkdocs: links to files outside of the site are replaced by their text.

Called by mkdocs (mkdocs.yml). Pages of docs/ link to code, examples and results, which readers of
the repository follow; tests/unit/test_docs.py checks that these exist.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")


def outside(link: str, page: str) -> bool:
    """True if a relative link of this page, whose path is relative to docs/, leads out of docs/."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link)).startswith("..")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page: the text without links that lead out of the site."""
    at = page.file.src_uri
    return LINK.sub(lambda m: m[1] if outside(m[2], at) else m[0], markdown)
