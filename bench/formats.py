"""Measures decoders whose weights are quantised, beside the same decoder in bf16, on one GPU. All
weights are random.

    python bench/formats.py llama-3.1-8b fp8 int4 mxfp4 q4_k --prompt 512 --json formats.json
    python bench/formats.py gpt-oss-20b mxfp4

A table shows the microseconds of one token at position 512, this time divided by the time with bf16
weights (if these are measured, too), the bytes that a token reads, and the rate at which it reads
them. Of a decoder with experts, only the bytes of the chosen experts are counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from contextlib import closing

from ark.backend import registry
from ark.cli.common import write_results
from ark.cli.measure.decode import decode
from ark.cli.measure.results import figure, results
from ark.cli.measure.turn import Turn
from ark.ir.dtype import bf16, fp4, fp32, uint4
from ark.models.build import Shape, parameters
from ark.models.config import BUILTIN_CONFIGS, LlamaConfig, builtin_config
from ark.models.fields import Fields
from ark.models.formats.layout import Layout
from ark.models.formats.mxfp4 import BLOCK_INPUTS
from ark.models.formats.on_load import ON_LOAD
from ark.models.gpt_oss import GptOss
from ark.models.holding import quantised_config
from ark.models.mixtral import MixtureConfig
from ark.models.qwen3_moe import Qwen3Moe

# Formats of checkpoints, besides those that weights can be quantised to while they are loaded.
LAYOUTS = {
    "mxfp4": Layout(fp4, BLOCK_INPUTS, bf16),
    "q4_k": Layout(uint4, 32, fp32, zeros=True),
}
PLAIN = "bf16"
PROMPT_CHUNK_TOKENS = 512


# Decoders with experts: the architecture, and the fields in which they differ from its defaults.
OF_EXPERTS = {
    "gpt-oss-20b": (
        GptOss,
        {
            "architectures": ["GptOssForCausalLM"],
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "vocab_size": 201088,
        },
    ),
    "qwen3-30b-a3b": (
        Qwen3Moe,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "head_dim": 128,
        },
    ),
}


def config_of(decoder: str, layers: int) -> LlamaConfig:
    """The config of a decoder. layers: the number of layers; 0 for the published number."""
    if decoder in OF_EXPERTS:
        architecture, own = OF_EXPERTS[decoder]
        fields = architecture.DEFAULTS | own
        fields["num_hidden_layers"] = layers or fields["num_hidden_layers"]
        return architecture.read_config(Fields(decoder, fields))
    config = builtin_config(decoder)
    return dataclasses.replace(config, num_hidden_layers=layers or config.num_hidden_layers)


def in_format(config: LlamaConfig, name: str) -> LlamaConfig:
    """The config with the weights of its linear layers in the format of that name. The weights of
    gpt-oss other than the experts' stay in bf16, as in its checkpoints.
    """
    if name == PLAIN:
        return config
    if name in ON_LOAD:
        return quantised_config(config, name, name)
    held = dict(quantised_config(config, "int4", name).layouts)
    if isinstance(config, MixtureConfig):
        held = {weight: layout for weight, layout in held.items() if ".mlp." in weight}
    layout = LAYOUTS[name]
    return dataclasses.replace(config, layouts=tuple((weight, layout) for weight in held))


def read_bytes(config: LlamaConfig, context: int) -> int:
    """The bytes that a token of one text reads: the weights of all layers and of the head, of
    experts only the chosen ones, and the cached keys and values.
    """
    layouts = dict(config.layouts)
    total = 2 * config.num_hidden_layers * config.kv_size * bf16.itemsize * context
    for name, shape in parameters(config).items():
        if name == "embedding":
            continue
        layout = layouts.get(name)
        size = layout.nbytes(shape) if layout else math.prod(shape) * bf16.itemsize
        if ".mlp." in name and isinstance(config, MixtureConfig) and shape[0] == config.experts:
            size = size * config.experts_per_token // config.experts if len(shape) > 1 else size
        total += size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("decoder", choices=[*BUILTIN_CONFIGS, *OF_EXPERTS])
    parser.add_argument("formats", nargs="+", choices=[PLAIN, *ON_LOAD, *LAYOUTS])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=0, help="measure a prompt of that length too")
    parser.add_argument("--layers", type=int, default=0, help="use only the first layers")
    parser.add_argument("--backend")
    parser.add_argument("--turn", help="a lock file, held while the device is used")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    backend, probe = registry.choose(args.backend)
    whole = config_of(args.decoder, args.layers)
    context = args.context + args.tokens + 2
    rows, plain = [], 0.0
    with closing(backend.open(0)) as device:
        for name in args.formats:
            config = in_format(whole, name)
            shape = Shape(config, bf16, context, args.prompt and PROMPT_CHUNK_TOKENS)
            figures = decode(
                shape,
                backend,
                device,
                contexts=(args.context,),
                tokens=args.tokens,
                prompts=(args.prompt,) if args.prompt else (),
                turn=Turn(args.turn),
            )
            token = figures.contexts[0].per_token
            plain = token if name == PLAIN else plain
            read = read_bytes(config, args.context + args.tokens // 2)
            share = f"{token / plain:.2f} of bf16" if plain else ""
            print(
                f"{args.decoder} {name}: {token * 1e6:.1f} us a token {share}; {read / 1e9:.2f} "
                f"GB, {read / token / 1e12:.2f} TB/s",
                *(f"; prompt of {p.length}: {p.seconds * 1e3:.3f} ms" for p in figures.prompts),
                flush=True,
            )
            label = f"decode/{args.decoder}-{name}"
            label += f"-{args.layers}-layers" if args.layers else ""
            detail = {"read_bytes": read, "weight_bytes": figures.weight_bytes}
            rows.append(figure(f"{label}-at-{args.context}", token, detail=detail))
            rows += [figure(f"{label}-prompt-{p.length}", p.seconds) for p in figures.prompts]
        words = ["bench/formats.py", args.decoder, *args.formats]
        write_results(args.json, results(probe, 0, device.machine, words, rows))


if __name__ == "__main__":
    main()
