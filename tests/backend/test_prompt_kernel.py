"""The plan of a prompt for matrix units that need both operands in one 16-bit type.

Activations are rounded to that type before each product. Gates are computed in the epilogues of
products. Each processor gets some tiles of queries. The prompt's last chunk samples the first
token. A CPU executes the plan by the common bodies.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from ark.backend import registry
from ark.backend.devices import Device
from ark.ir.dtype import DataType, by_name
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.load import weights
from ark.models.plans import make_plans
from ark.ops.tokens import MAX_STOPS
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from tests.checkpoints import make_checkpoint
from tests.projection import Projection, with_matrix
from tests.slow import slow

LENGTHS = (2, 127, 128, 129, 250)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Returns a checkpoint for each width of a head."""
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "intermediate": 96, "context": 300}
    return {
        width: make_checkpoint(
            tmp_path_factory.mktemp(f"prompts{width}"), dtype="bfloat16", head_dim=width, **sizes
        )
        for width in (16, 64)
    }


def planned(shape: Shape, device: Device, cuts: dict[str, list[int]]) -> Plan:
    """Returns the plan for this CPU with the variant `matrix`. cuts: the tiles of products."""
    (plan,) = make_plans(shape, with_matrix(device.machine), {"variant": "matrix", "cuts": cuts})
    return plan


@pytest.mark.parametrize(("parts", "width"), [pytest.param(1, 16, marks=slow), (2, 64)])
def test_prompt_for_matrix_units_gives_the_models_tokens(
    directories: dict[int, Path], parts: int, width: int
) -> None:
    """A prompt planned for matrix units gives the model's tokens on the CPU. parts: the number of
    parts of k in the products that end a layer; the op that adds them also normalises the rows.
    width: elements of a head; for 64 the projection itself rotates heads.
    """
    backend, _ = registry.choose("cpu")
    directory = directories[width]
    checkpoint = Checkpoint.open(directory)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompt = [int(t) for t in np.random.default_rng(3).integers(0, 320, 260)]
    with contextlib.closing(backend.open(0)) as device:
        dtype = DataType.from_numpy(checkpoint.dtype)
        assert dtype == by_name("bf16")
        shape = Shape(checkpoint.config, dtype, 280, 128)
        plan = planned(shape, device, {"1x1x128x64x96x2": [128, 64, parts]})
        kinds = {op.kind for op in plan.ops}
        assert ("combine_norm" in kinds) == (parts > 1)
        products = [op for op in plan.ops if op.kind == "matmul"]
        assert any("head_dim" in op.params for op in products) == (width == 64)
        assert "attention_tiles" in kinds and any(op.params.get("gated") for op in products)
        assert all(plan.tensors[op.operands[0]].dtype == "bf16" for op in products)
        with Executor(plan, backend, device) as executor:
            for name, array in weights(checkpoint, shape, plan):
                executor.write(name, array)
            executor.write("stops", np.full(MAX_STOPS, -1))
            for length in LENGTHS:
                executor.write("tokens", np.array(prompt[:length]))
                executor.write("position", np.zeros(1))
                executor.write("settings", np.array([0, 0, 0, length - 1, length + 3, 0, 0]))
                executor.start(shape.iterations(length, 3)).wait(60)
                got = executor.read("tokens")[length : length + 3].tolist()
                _near(model, prompt[:length], got)


@pytest.mark.parametrize("position", [0, 7, 100])
def test_projection_rotates_and_appends_its_rows(position: int) -> None:
    """A projection in tiles of rows rotates queries and keys and appends to the caches. Rows beyond
    the caches' end are dropped, and other rows stay unchanged.
    """
    projection = Projection(rows=200, k=72, heads=3, kv_heads=1, width=64, context=230)
    assert _projected(projection, position)["tile"][0] < projection.rows


@pytest.mark.parametrize("page", [0, 10])
@pytest.mark.parametrize("position", [0, 20])
def test_projection_appends_a_row_to_each_sequence(position: int, page: int) -> None:
    """A tile has a row of each of 12 sequences, whose positions differ; from position 20 on, the
    last ones are outside of the caches.
    """
    sizes = {"rows": 12, "k": 72, "heads": 4, "kv_heads": 2, "width": 64, "context": 50}
    projection = Projection(**sizes, each=True, page=page)
    assert _projected(projection, position)["tile"][0] == projection.rows


def _projected(projection: Projection, position: int) -> dict[str, Any]:
    """Compares a projection on the CPU with NumPy's. Returns the parameters of its product."""
    backend, _ = registry.choose("cpu")
    given = projection.random(np.random.default_rng(position))
    with contextlib.closing(backend.open(0)) as device:
        plan = projection.plan(with_matrix(device.machine))
        (op,) = plan.ops
        assert op.kind == "matmul"
        with Executor(plan, backend, device) as executor:
            for name, array in given.items():
                executor.write(name, array)
            executor.write("position", projection.positions(position))
            executor.start(1).wait(60)
            for name, right in projection.expected(given, position).items():
                got = executor.read(name).astype(np.float64)
                np.testing.assert_allclose(got, right, rtol=2**-7, atol=2**-5, err_msg=name)
    return dict(op.params)


def _near(model: LlamaForCausalLM, prompt: list[int], drawn: list[int]) -> None:
    """Asserts that transformers' logit of each drawn token equals its best one within the rounding
    of bf16.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + drawn])).logits[0].float()
    for i, token in enumerate(drawn):
        row = logits[len(prompt) - 1 + i]
        spread = float(row.std())
        assert float(row.max() - row[token]) <= 0.05 * spread, (len(prompt), i, token)
