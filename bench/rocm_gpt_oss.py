"""Predicts times of gpt-oss-120B on an AMD GPU: of one token for each of several requests, and of
the groups of ops of one layer. The weights of experts are MXFP4, all others bf16; all are random.
The result is predicted, not measured.

    python bench/rocm_gpt_oss.py --requests 1,8
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses

import ark_rocm_emulator
from ark_rocm import backend

from ark.cli.measure.decode import fill_caches, random_weights
from ark.cli.trace import measured_events
from ark.ir.dtype import bf16, fp4
from ark.models.build import Shape
from ark.models.config import LlamaConfig
from ark.models.fields import Fields
from ark.models.formats.layout import Layout
from ark.models.formats.mxfp4 import BLOCK_INPUTS
from ark.models.gpt_oss import GptOss
from ark.models.plans import plans
from ark.models.sampling import GREEDY
from ark.models.sequences import write_sequences
from ark.runtime.executor import Executor

LAYERS, CONTEXT, TRACE_RECORDS = 36, 512, 1024
# For each group of a layer's ops, in order: a part of the name of the op that ends the group.
GROUPS = {
    "query, key, value": "query+key+value",
    "attention": "attention.attention",
    "output, router, top-k": "topk",
    "experts": "",
}


def config(layers: int, experts: int = 128, words: int = 201088) -> LlamaConfig:
    """The model's configuration; by default all fields have the published values except the number
    of layers.
    """
    fields = GptOss.DEFAULTS | {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "vocab_size": words,
    }
    codes = Layout(fp4, BLOCK_INPUTS, bf16)
    names = (f"layers.{n}.mlp.{side}" for n in range(layers) for side in ("gate", "up", "down"))
    whole = GptOss.read_config(Fields("gpt-oss-120b", fields))
    return dataclasses.replace(whole, layouts=tuple((name, codes) for name in names))


def predict(
    shape: LlamaConfig, requests: int = 1, model: str = "mi355x"
) -> tuple[float, dict[str, float]]:
    """Predicts the decoding of one token for each of `requests` requests. Returns the microseconds
    of the token, extrapolated to all layers, and those of each group of ops in the layer before the
    last.
    """
    layers = shape.num_hidden_layers
    text = [i * 31 % 97 + 1 for i in range(CONTEXT)]
    texts = [[*text, 100 + 7 * n] for n in range(requests)]
    asked = Shape(shape, bf16, CONTEXT + 2, 0, batch=requests)
    with ark_rocm_emulator.emulated(model), contextlib.closing(backend.open(0)) as device:
        (plan,) = plans(asked, device.machine, None)
        with Executor(plan, backend, device, trace_records=TRACE_RECORDS) as executor:
            for name, values in random_weights(plan, shape):
                executor.write(name, values)
            fill_caches(executor, plan)
            write_sequences(executor, asked, texts, [CONTEXT + 2] * requests, GREEDY, (), CONTEXT)
            run = executor.start(1)
            run.wait(3600)
            launch = run.elapsed_ms() * 1e3
            events = [e for e in measured_events(executor) if e["ph"] == "X"]
    ends = [group_ends(events, number) for number in range(layers)]
    begin = ends[-3]["experts"]
    times = {}
    for group, end in ends[-2].items():
        times[group], begin = end - begin, end
    layer = (ends[-1]["experts"] - ends[0]["experts"]) / (layers - 1)
    return launch + (LAYERS - layers) * layer, times


def group_ends(events: list[dict], layer: int) -> dict[str, float]:
    """For each group of a layer's ops, the time (in microseconds from the beginning of the trace)
    at which its last task ends.
    """
    own = [e for e in events if f".layers.{layer}." in e["name"]]
    return {
        group: max(e["ts"] + e["dur"] for e in own if last in e["name"])
        for group, last in GROUPS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mi355x")
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--layers", type=int, default=3, help="that run; the others are scaled")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--words", type=int, default=201088, help="of the vocabulary")
    args = parser.parse_args()
    for requests in map(int, args.requests.split(",")):
        token, groups = predict(config(args.layers, args.experts, args.words), requests, args.model)
        parts = ", ".join(f"{name} {us:.1f}" for name, us in groups.items())
        print(
            f"{requests} requests: {token:.1f} us a token of each (predicted; {args.layers} of "
            f"{LAYERS} layers, scaled); a layer: {parts}",
            flush=True,
        )


if __name__ == "__main__":
    main()
