"""Tasks do not read shared memory that they have not written: it is filled with NaN before each
task, and results stay the same.

The contents that an earlier kernel left differ from run to run, so a body that reads a word before
writing it fails only sometimes. Matrix products whose loading warpgroup runs ahead are excluded,
because two tasks use their shared memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from ark.backend.codegen import writer
from ark.backend.codegen.bodies import Bodies
from tests.cases import decoder_ops, decoders, ops

pytestmark = pytest.mark.emulated("slow")

POISON = """
ARK_DEVICE void ark_poison_scratch(ArkCtx& c) {
  ark_sync();
  ark_u32* words = reinterpret_cast<ark_u32*>(ARK_SCRATCH(c));
  for (int i = ark_tid(); i < (ARK_SCRATCH_BYTES - ARK_LOOP_BYTES) / 4; i += ARK_THREADS) {
    words[i] = 0xffffffffu;  // in fp32, fp16 and bf16 no number; as an index far out of bounds
  }
  ark_sync();
}
"""
DISPATCH = "ARK_DEVICE bool ark_dispatch(ArkCtx& c, const ArkTask& t) {\n"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    written = []
    dispatch = writer.dispatch

    def poisoning(bodies: Bodies, seldom: Collection[int]) -> str:
        text = dispatch(bodies, seldom)
        if bodies.loads:
            return text
        assert text.count(DISPATCH) == 1
        written.append(bodies)
        return POISON + text.replace(DISPATCH, DISPATCH + "  ark_poison_scratch(c);\n")

    monkeypatch.setattr(writer, "dispatch", poisoning)
    yield
    assert written, "no kernel of this test was written with the poison"


def rows(backend: str) -> None:
    for shapes in ops.ROWS.values():
        ops.check_rows(backend, shapes)


OPS = (
    ops.check_matmul,
    ops.check_reductions,
    rows,
    ops.check_movement,
    ops.check_attention,
    decoder_ops.check_swiglu_and_linear_equal_torch,
)


@pytest.mark.parametrize("test", OPS, ids=lambda t: t.__name__.removeprefix("check_"))
def test_kinds(backend: str, poisoned: None, test: Callable[[str], None]) -> None:
    test(backend)


@pytest.mark.parametrize("case", ["qwen3", "mixtral"])
def test_decoders(backend: str, poisoned: None, case: str, tmp_path: Path) -> None:
    decoders.check_tokens_and_logits_are_those_of_transformers(backend, case, tmp_path)
