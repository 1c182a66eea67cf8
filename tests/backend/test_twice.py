"""An embedding that writes its rows in two types at once: both equal the table's rows.

ark.lower.rewrite.round_norm_inputs creates such embeddings.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.ir.dtype import bf16, int32
from ark.lower.pipeline import plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor


def test_embedded_rows_are_written_in_fp32_and_16_bits(backend: str) -> None:
    model = Model(0, 1)
    with use_model(model):
        tokens = ark.tensor([12], int32, name="tokens")
        table = ark.parameter([9, 70], bf16, name="table")
        position = ark.tensor([1], int32, name="position")
        ark.embed(tokens, table, position, rows=3, name="rows")
    graph = model.graph
    node = next(n for n in graph.nodes if n.type == "embed")
    second = graph.tensor((3, 70), bf16, name="again")
    graph.nodes[graph.nodes.index(node)] = dataclasses.replace(
        node, outputs=(*node.outputs, second)
    )
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((9, 70)).astype(bf16.numpy)
    ids, place = rng.integers(0, 9, 12).astype(np.int32), np.array([2], np.int32)
    right = rows[ids[2:5]]
    with contextlib.closing(registry.get(backend).open(0)) as device:
        planned = plan(graph, device.machine, {"packets": False})
        verify([planned])
        with Executor(planned, registry.get(backend), device) as executor:
            executor.write("tokens", ids)
            executor.write("table", rows)
            executor.write("position", place)
            executor.start(1).wait()
            assert np.array_equal(executor.read("rows").reshape(3, 70), right.astype(np.float32))
            assert np.array_equal(executor.read("again").reshape(3, 70), right)
