"""The README as the package index shows it: links to files and pictures of the
repository become their text.

Called by hatchling (pyproject.toml) when it makes the metadata of a wheel or an sdist. The index
has none of these files, and the project has no public address that links could lead to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"!?\[([^\]]+)\]\((?!https?://)[^)\s]+\)")


def readme(text: str) -> str:
    """The text with the words alone of each link that is not to an address."""
    return LINK.sub(r"\1", text)


class Readme(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        page = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(page)}
