"""AMD's ops on one row, executed on the emulator: attention in tiles of one row (windows, soft
caps, sinks), and rmsnorm and topk whose input travels as packets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from ark_rocm import backend
from ark_rocm.tasks import attention, packet_rows

from ark.backend.codegen.body import Body
from ark.errors import PlanError
from ark.ir.dtype import bf16, fp32, int32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan import kind as kinds
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.slow import in_turns

pytest.importorskip("ark_rocm_emulator")

pytestmark = pytest.mark.emulated("slow")

ARCHS = ("gfx950", "gfx942", "gfx1100")

# The calls of attention: (heads, key heads, width of a head, rows of the cache, position, window,
# soft cap, True if there are sinks).
TILES = [
    (8, 2, 64, 300, 250, 128, 0.0, True),
    (4, 4, 64, 300, 20, 128, 0.0, True),  # fewer positions than the window has
    (6, 2, 128, 200, 199, 100, 5.0, False),
    (2, 1, 32, 130, 64, 7, 0.0, False),
    (2, 1, 64, 700, 650, 0, 3.0, False),  # more positions than are loaded at once
    (2, 2, 32, 64, 0, 16, 0.0, False),  # only the newest position
]


@pytest.mark.parametrize(
    ("arch", "heads", "kv_heads", "width", "room", "position", "window", "cap", "sinks"),
    in_turns(ARCHS, TILES),
    indirect=["arch"],
)
def test_attention_in_tiles_of_one_row(
    arch: str,
    heads: int,
    kv_heads: int,
    width: int,
    room: int,
    position: int,
    window: int,
    cap: float,
    sinks: bool,
) -> None:
    del arch
    random = np.random.default_rng(heads + position)
    given = {"q": random.standard_normal((1, heads * width)).astype(np.float32) * 4}
    for name in ("keys", "values"):
        rows = random.standard_normal((kv_heads, room, width))
        rows[:, position + 1 :] = np.nan  # not visible
        given[name] = rows.astype(ml_dtypes.bfloat16)
    given["position"] = np.array([position], np.int32)
    if sinks:
        given["sinks"] = random.standard_normal(heads).astype(np.float32) * 4
    types = {"q": fp32, "keys": bf16, "values": bf16, "position": int32, "sinks": fp32}
    graph = Graph()
    inputs = [graph.tensor(a.shape, types[n], arena="state", name=n) for n, a in given.items()]
    out = graph.tensor((1, heads * width), fp32, arena="state", name="out")
    attrs = {"heads": heads, "head_dim": width, "scale": width**-0.5, "sinks": sinks}
    graph.add("attention", inputs, [out], attrs | {"window": window, "softcap": cap}, "attention")
    with contextlib.closing(backend.open(0)) as device:
        planned = plan(graph, device.machine)
        verify([planned])
        (op,) = (op for op in planned.ops if op.kind == "attention_tiles")
        assert attention.OneRowTiles().serves(kinds.signature(planned, op), device.machine)
        with Executor(planned, backend, device) as executor:
            for name, array in given.items():
                executor.write(name, array)
            executor.start(2).wait()
            got = executor.read("out").reshape(heads, width)
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    seen = slice(max(0, position - window + 1) if window else 0, position + 1)
    for head in range(heads):
        group = head * kv_heads // heads
        scores = wide["keys"][group, seen] @ wide["q"].reshape(heads, width)[head] * width**-0.5
        if cap:
            scores = cap * np.tanh(scores / cap)
        if sinks:
            scores = np.append(scores, given["sinks"][head])
        values = wide["values"][group, seen]
        weights = np.exp(scores - scores.max())
        want = weights[: len(values)] / weights.sum() @ values
        np.testing.assert_allclose(got[head], want, rtol=1e-5, atol=1e-5)


def of_packets(
    graph: Graph, inputs: dict[str, np.ndarray], body: Body, results: Sequence[str]
) -> list[np.ndarray]:
    """Returns the rows of `results` after three iterations of the graph, in which one op reads
    packets. `body` must serve this op, and the vendor-independent body must refuse it.
    """
    with contextlib.closing(backend.open(0)) as device:
        planned = plan(graph, device.machine)
        verify([planned])
        (op,) = (op for op in planned.ops if op.kind == body.kind)
        assert planned.tensors[op.operands[0]].packet
        signature = kinds.signature(planned, op)
        assert body.serves(signature, device.machine)
        with pytest.raises(PlanError, match="reads packets"):
            kinds.get(body.kind).source("name", signature, device.machine)
        with Executor(planned, backend, device) as executor:
            for name, array in inputs.items():
                executor.write(name, array)
            executor.start(3).wait()
            return [executor.read(name)[0] for name in results]


NAN, INF = float("nan"), float("inf")
# Rows of which topk chooses the 4 largest elements. The length of some rows is a multiple of the
# number of a wave's lanes.
CHOICES = {
    "random": np.random.default_rng(0).standard_normal(128),
    "equal": np.array([0.0, -0.0, 3.0, 3.0, *[-1.0] * 67, 3.0, 0.0]),
    "nan": np.array([1.0, NAN, INF, -INF, *[2.0] * 90, NAN]),
    "infinite": np.array([-INF] * 30 + [1.0, -2.0] + [-INF] * 40),
    "far": np.array([*range(70), 900.0, *range(100, 120)]),  # equal in the softmax of the row
}


@pytest.mark.parametrize(
    ("arch", "case", "softmax"),
    in_turns(ARCHS, [(case, softmax) for case in CHOICES for softmax in ("", "softmax", "row")]),
    indirect=["arch"],
)
def test_topk_of_packets(arch: str, case: str, softmax: str) -> None:
    """The input of topk is computed by a linear layer whose tasks store packets."""
    del arch
    scores = CHOICES[case].astype(np.float32)
    n, k = len(scores), 4
    weight = np.zeros((n, 64), np.float32)
    weight[:, 0] = scores
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = 1.0
    graph = Graph()
    given = graph.tensor((1, 64), fp32, arena="state", name="x")
    rows = graph.tensor((n, 64), fp32, arena="parameter", name="weight")
    logits = graph.tensor((1, n), fp32, name="logits")
    graph.add("linear", [given, rows], [logits], {"prologue": "none", "epilogue": "store"}, "l")
    values = graph.tensor((1, k), fp32, arena="state", name="values")
    chosen = graph.tensor((1, k), int32, arena="state", name="chosen")
    attrs = {"k": k, "softmax": softmax == "softmax", "row_softmax": softmax == "row"}
    graph.add("topk", [logits], [values, chosen], attrs, "topk")
    body = packet_rows.TopK()
    got, places = of_packets(graph, {"x": x, "weight": weight}, body, ("values", "chosen"))
    if softmax == "row":
        with np.errstate(invalid="ignore"):
            scores = np.exp(scores - scores.max())
            scores /= scores.sum()
    key = np.where(np.isnan(scores), INF, scores.astype(np.float64))
    order = sorted(range(n), key=lambda i: (not np.isnan(scores[i]), -key[i], i))[:k]
    assert places.tolist() == order
    want = scores[order].astype(np.float64)
    if softmax == "softmax":
        with np.errstate(invalid="ignore"):
            want = np.exp(want - want.max())
            want /= want.sum()
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("arch", "k"), in_turns(ARCHS, [(2880,), (64,), (4096,)]), indirect=["arch"]
)
def test_norm_of_packets(arch: str, k: int) -> None:
    """The input of rmsnorm is computed by a linear layer whose tasks store packets."""
    del arch
    random = np.random.default_rng(k)
    arrays = {
        "x": random.standard_normal((1, 64)).astype(np.float32),
        "weight": random.standard_normal((k, 64)).astype(np.float32),
        "factors": random.standard_normal(k).astype(ml_dtypes.bfloat16),
    }
    graph = Graph()
    x = graph.tensor((1, 64), fp32, arena="state", name="x")
    weight = graph.tensor((k, 64), fp32, arena="parameter", name="weight")
    factors = graph.tensor((k,), bf16, arena="parameter", name="factors")
    middle = graph.tensor((1, k), fp32, name="middle")
    graph.add("linear", [x, weight], [middle], {"prologue": "none", "epilogue": "store"}, "l")
    out = graph.tensor((1, k), fp32, arena="state", name="out")
    graph.add("rmsnorm", [middle, factors], [out], {"eps": 1e-5}, "norm")
    (got,) = of_packets(graph, arrays, packet_rows.Norm(), ("out",))
    row = arrays["weight"].astype(np.float64) @ arrays["x"][0].astype(np.float64)
    want = row / np.sqrt((row**2).mean() + 1e-5) * arrays["factors"].astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
