"""One self-contained HTML page that shows a predicted plan: layers across, ranks down.

`render_page` is called by `ark parallelize --html`. Colours are layouts; a block that is chosen
shows its ops with what moves between them; bars are memory by rank; below them the pipeline's
timeline. Style and drawing helpers are those of the collectives' page (ark.comm.page).
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np

from ark.comm.page import fill
from ark.parallel.plans.prediction import BlockCost, Prediction
from ark.parallel.plans.rules import PLANS

__all__ = ["page_data", "render_page"]

MOST_SPANS = 20_000  # of the timeline


def page_data(made: Prediction, title: str) -> dict[str, Any]:
    """What the page draws, as JSON data. Times in microseconds, memory in bytes.

    place_of: by rank, its place in the pipeline. A block's stage is -1 where all ranks share it; a
    place runs the stages that `runs` lists.
    """
    axis = next((i for i, name in enumerate(made.names) if made.depth == made.mesh[i] > 1
                 and name not in PLANS), None)  # fmt: skip
    ranks = int(np.prod(made.mesh))
    places = np.unravel_index(np.arange(ranks), made.mesh)
    place_of = [0] * ranks if axis is None else [int(p) for p in places[axis]]
    both = "chimera" in made.names
    runs = [
        [s for s, at in enumerate(made.rank_of) if at == p or (both and made.depth - 1 - at == p)]
        for p in range(made.depth)
    ]
    return {
        "runs": [],
        "title": title,
        "mesh": list(made.mesh),
        "names": list(made.names),
        "training": made.work.training,
        "recompute": made.work.recompute,
        "us": round(made.us, 1),
        "ranks": ranks,
        "placeOf": place_of,
        "stages": runs,
        "blocks": [_block(b, s, made) for b, s in zip(made.blocks, made.stage_of, strict=True)],
        "memory": [[m.parameters, m.gradients, m.optimizer, m.activations] for m in made.memory],
        "send": [made.send_bytes, round(made.send_us, 2)],
        "synced": [made.synced_bytes, round(made.synced_us, 2)],
        "update": round(made.update_us, 2),
        "tick": made.tick_us,
        "makespan": made.schedule.makespan,
        "spans": [
            [e.block, e.micro_batch, e.start, e.span, list(e.devices)]
            for e in made.schedule.entries[:MOST_SPANS]
        ],
    }


def _block(cost: BlockCost, stage: int, made: Prediction) -> dict[str, Any]:
    place = {node.id: i for i, node in enumerate(cost.block.nodes)}
    counts = [made.mesh[axis] for axis in made.axes] or [1]
    return {
        "name": cost.block.name,
        "stage": stage,
        "forward": round(cost.forward_us, 2),
        "backward": round(cost.backward_us, 2),
        "parameters": cost.parameter_bytes,
        "ops": [
            {
                "name": node.name.removeprefix(cost.block.name + "."),
                "type": node.type,
                "state": _kinds(made.options[node.id].output, counts, node.outputs[0].shape),
                "shape": list(node.outputs[0].shape),
                "us": round(made.options[node.id].us, 2),
            }
            for node in cost.block.nodes
        ],
        "moves": [
            {
                "from": place.get(change.writer, -1),
                "to": place[change.reader],
                "backward": change.backward,
                "steps": [[m.op, m.axis, round(m.bytes), round(m.us, 2)] for m in change.moves],
            }
            for change in cost.changes
        ],
    }


def _kinds(state: tuple[str, ...], counts: list[int], shape: tuple[int, ...]) -> list[str]:
    """Along each split axis of so many ranks: "whole", "rows", "columns" or "sums"."""
    words = {"R": "whole", "V": "sums", str(len(shape) - 1): "columns"}
    return [
        words.get(kind, "rows") if count > 1 else "whole"
        for kind, count in zip(state, counts, strict=True)
    ]


def render_page(made: Prediction, title: str) -> str:
    """The page's HTML; the same prediction gives the same bytes."""
    own = resources.files("ark.parallel.page") / "assets"
    shared = resources.files("ark.comm.page") / "assets"
    style = (shared / "page.css").read_text("utf-8") + (own / "plan.css").read_text("utf-8")
    script = (shared / "draw.js").read_text("utf-8") + (own / "plan.js").read_text("utf-8")
    return fill((own / "plan.html").read_text("utf-8"), style, script, page_data(made, title))
