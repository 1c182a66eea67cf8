"""Draws a predicted plan as one self-contained HTML page, with layers in columns and ranks in rows.

`render_page` is called by `ark parallelize --html`. Colours stand for layouts. Selecting a block
shows its ops and the communication between them. Below are bars with the memory of each rank, and
the pipeline's timeline. The style and the drawing helpers are those of the page about collectives
(ark.collective.page).
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np

from ark.collective.page import fill
from ark.parallel.plans.prediction import BlockCost, Prediction
from ark.parallel.plans.rules import PLANS

__all__ = ["page_data", "render_page"]

MOST_SPANS = 20_000  # most entries of the timeline


def page_data(prediction: Prediction, title: str) -> dict[str, Any]:
    """The page's content as JSON data. Times in microseconds, memory in bytes.

    The entry place_of has the position of each rank in the pipeline, and `runs` the stages that run
    at each position. A block that all ranks share has the stage -1.
    """
    pipelines = (
        i
        for i, name in enumerate(prediction.names)
        if prediction.depth == prediction.mesh[i] > 1 and name not in PLANS
    )
    axis = next(pipelines, None)
    ranks = int(np.prod(prediction.mesh))
    places = np.unravel_index(np.arange(ranks), prediction.mesh)
    place_of = [0] * ranks if axis is None else [int(p) for p in places[axis]]
    two_directions = "chimera" in prediction.names
    runs = [
        [
            s
            for s, at in enumerate(prediction.rank_of)
            if at == p or (two_directions and prediction.depth - 1 - at == p)
        ]
        for p in range(prediction.depth)
    ]
    return {
        "runs": [],
        "title": title,
        "mesh": list(prediction.mesh),
        "names": list(prediction.names),
        "training": prediction.work.training,
        "recompute": prediction.work.recompute,
        "us": round(prediction.us, 1),
        "ranks": ranks,
        "placeOf": place_of,
        "stages": runs,
        "blocks": [
            _block(b, s, prediction)
            for b, s in zip(prediction.blocks, prediction.stage_of, strict=True)
        ],
        "memory": [
            [m.parameters, m.gradients, m.optimizer, m.activations] for m in prediction.memory
        ],
        "send": [prediction.send_bytes, round(prediction.send_us, 2)],
        "synced": [prediction.synced_bytes, round(prediction.synced_us, 2)],
        "update": round(prediction.update_us, 2),
        "tick": prediction.tick_us,
        "makespan": prediction.schedule.makespan,
        "spans": [
            [e.block, e.micro_batch, e.start, e.span, list(e.devices)]
            for e in prediction.schedule.entries[:MOST_SPANS]
        ],
    }


def _block(cost: BlockCost, stage: int, prediction: Prediction) -> dict[str, Any]:
    place = {node.id: i for i, node in enumerate(cost.block.nodes)}
    counts = [prediction.mesh[axis] for axis in prediction.axes] or [1]
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
                "state": _kinds(prediction.options[node.id].output, counts, node.outputs[0].shape),
                "shape": list(node.outputs[0].shape),
                "us": round(prediction.options[node.id].us, 2),
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
    """A tensor's layout along each axis of the mesh: "whole", "rows", "columns" or "sums". state:
    see ark.parallel.plans.choices.State. counts: the sizes of the axes; an axis of size 1 does not
    split. shape: the tensor's shape.
    """
    words = {"R": "whole", "V": "sums", str(len(shape) - 1): "columns"}
    return [
        words.get(kind, "rows") if count > 1 else "whole"
        for kind, count in zip(state, counts, strict=True)
    ]


def render_page(prediction: Prediction, title: str) -> str:
    """The page's HTML. It is deterministic: the same prediction gives the same bytes."""
    own = resources.files("ark.parallel.page") / "assets"
    shared = resources.files("ark.collective.page") / "assets"
    style = (shared / "page.css").read_text("utf-8") + (own / "plan.css").read_text("utf-8")
    script = (shared / "draw.js").read_text("utf-8") + (own / "plan.js").read_text("utf-8")
    return fill((own / "plan.html").read_text("utf-8"), style, script, page_data(prediction, title))
