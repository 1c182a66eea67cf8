"""Draws one self-contained HTML page that shows how collectives run on a network.

`render_page` is called by `ark topo compare` and `ark topo simulate`. The page is one file and
needs neither a server nor internet access. It shows the links coloured by load, one tree at a time,
and a timeline of all puts (one-sided writes) that can be played.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from ark.collective.page.data import page_data
from ark.collective.programs import CollectiveProgram
from ark.collective.simulate import SimulationResult
from ark.collective.topology import Topology
from ark.errors import InvalidUsageError

__all__ = ["fill", "render_page"]

_SCRIPTS = ("draw.js", "network.js", "tree.js", "timeline.js", "main.js")


def render_page(
    topology: Topology,
    runs: Sequence[tuple[CollectiveProgram, SimulationResult]],
    bound_us: float | None = None,
) -> str:
    """Returns the page's HTML.

    Args:
        topology: the network that the runs were simulated on.
        runs: programs of one collective and size with their simulations; the first is shown first.
        bound_us: the least time that the optimum allows, in microseconds, if it is known.

    Raises:
        InvalidUsageError: there is no run, or the runs are not of one collective and size.
    """
    kinds = {(program.collective, result.size_bytes) for program, result in runs}
    if len(kinds) != 1:
        raise InvalidUsageError(
            f"A page shows runs of one collective and one size, but got {len(kinds)} kinds of runs."
        )
    assets = resources.files("ark.collective.page") / "assets"
    html = (assets / "page.html").read_text(encoding="utf-8")
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = "\n".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return fill(html, style, script, page_data(topology, runs, bound_us))


def fill(html: str, style: str, script: str, data: Any) -> str:
    """Inserts style, script and data into a page that is one file. The data is JSON, which browsers
    do not run as a script.
    """
    text = json.dumps(data, separators=(",", ":"))
    # A "<" in a name could end the HTML script element that holds the data. JSON readers read
    # "\u003c" as the same text.
    safe = text.replace("<", "\\u003c")
    for mark, part in {"/*STYLE*/": style, "/*SCRIPT*/": script, "/*DATA*/": safe}.items():
        html = html.replace(mark, part)
    return html
