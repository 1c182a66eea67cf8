"""The README and the project's addresses as the package index shows them.

Called by hatchling (pyproject.toml) when it makes the metadata of a wheel or an sdist. The index
has no files of the repository. If the environment names the repository's address, as GitHub's
workflows do, the README's links and pictures lead there, and the metadata has the project's URLs.
Otherwise the links become their text, and there are no URLs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://)([^)\s]+)\)")


def address(environment: Mapping[str, str]) -> str:
    """The repository's address, from the variables that a workflow of GitHub sets; "" without."""
    server, name = (environment.get(f"GITHUB_{word}", "") for word in ("SERVER_URL", "REPOSITORY"))
    return f"{server}/{name}" if server and name else ""


def readme(text: str, repository: str = "") -> str:
    """The text with links to the repository's files at its address; without an address, with the
    words alone of each such link.
    """

    def link(match: re.Match[str]) -> str:
        picture, words, path = match.groups()
        if not repository:
            return words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(link, text)


def urls(repository: str) -> dict[str, str]:
    """The project's URLs by their labels; none without an address."""
    if not repository:
        return {}
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class Readme(MetadataHookInterface):
    """Sets `readme` and `urls`, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        page = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = address(os.environ)
        text = readme(page, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(repository)
