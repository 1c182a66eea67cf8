"""The named programs whose plans are stored in ci/plans: the ops of `ark bench ops` (an LSTM among
them), decoders, networks, collectives and training steps. No program needs torch. Called by
ci/plans.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ark
from ark.cli.measure.case import OpCase
from ark.cli.measure.cases import cases
from ark.cli.measure.ops import input_type
from ark.cli.measure.sweep.cases import SWEEP
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.ir.graph import Graph
from ark.machine import Machine
from ark.models.build import Shape, build
from ark.models.config import LlamaConfig, Rope, builtin_config
from ark.models.holding import quantised_config
from ark.models.plans import usual_chunk

SMALL_BYTES = 1 << 24  # bytes of a collective's largest message


@dataclass(frozen=True)
class Program:
    """A program whose plan is stored. graphs: a function of the machine, which builds one graph per
    rank. options: the planner's options. on_cpu: True if the program is small enough for the few
    processors of a CPU.
    """

    name: str
    graphs: Callable[[Machine], Sequence[Graph]]
    options: Mapping[str, Any] = field(default_factory=dict)
    on_cpu: bool = True


def programs() -> tuple[Program, ...]:
    """All programs, in the order of the files."""
    ops = [_op(case) for case in cases() if not case.name.startswith(SWEEP)]
    return (*ops, *_decoders(), *_networks(), *_training(), *_collectives())


def _op(case: OpCase) -> Program:
    def graph(machine: Machine) -> list[Graph]:
        model = Model()
        with use_model(model):
            case.build(
                *(
                    Tensor(
                        model.graph.tensor(s, input_type(case, i), arena="state", name=f"in{i}"),
                        model,
                    )
                    for i, s in enumerate(case.shapes)
                )
            )
        return [model.graph]

    return Program(case.name, graph, {"fuse": case.fuse}, case.on_cpu)


# Published shapes. They have fewer layers if more layers would only repeat the same tasks.
QWEN3_8B = LlamaConfig(
    *(4096, 12288, 4, 32, 8, 128, 151936, 40960),
    rope=Rope(1000000.0),
    architecture="Qwen3ForCausalLM",
)
SMALL_LLAMA = LlamaConfig(576, 1536, 4, 9, 3, 64, 49152, 2048, tie_word_embeddings=True)


def _decoder(
    name: str,
    config: LlamaConfig,
    layers: int,
    *,
    prompt: bool = False,
    batch: int = 1,
    ranks: int = 1,
    dtype: ark.DataType = ark.bf16,
    on_cpu: bool = False,
    quantize: str | None = None,
) -> Program:
    few = dataclasses.replace(config, num_hidden_layers=layers)
    few = quantised_config(few, quantize, name)

    def graphs(machine: Machine) -> list[Graph]:
        chunk = usual_chunk(machine, dtype) if prompt else 0
        shape = Shape(few, dtype, 1024, chunk, 0, ranks, batch)
        return [build(dataclasses.replace(shape, rank=rank)).graph for rank in range(ranks)]

    return Program(f"decoder-{name}", graphs, {"lockstep": True}, on_cpu)


def _decoders() -> list[Program]:
    one, eight, seventy = (builtin_config(f"llama-3.{n}") for n in ("2-1b", "1-8b", "1-70b"))
    return [
        _decoder("1b-prompts-of-4-layers", one, 4, prompt=True),
        _decoder("1b-batch-8", one, 16, batch=8),
        _decoder("1b-batch-16-of-4-layers", one, 4, batch=16),
        _decoder("1b-fp8-batch-16-of-4-layers", one, 4, batch=16, quantize="fp8"),
        _decoder("8b-prompts-of-2-layers", eight, 2, prompt=True),
        _decoder("8b-2-ranks", eight, 8, ranks=2),
        _decoder("70b-8-ranks-of-4-layers", seventy, 4, ranks=8),
        _decoder("qwen3-8b-of-4-layers", QWEN3_8B, 4),
        _decoder("135m-fp32", SMALL_LLAMA, 4, prompt=True, dtype=ark.fp32, on_cpu=True),
    ]


def _program(name: str, make: Callable[[], Any], on_cpu: bool = True) -> Program:
    def graph(machine: Machine) -> list[Graph]:
        model = Model()
        with use_model(model):
            make()
        return [model.graph]

    return Program(name, graph, {}, on_cpu)


def _weight(*shape: int, dtype: ark.DataType = ark.bf16) -> Tensor:
    return ark.parameter(list(shape), dtype)


def _convolved(x: Tensor, out: int, kernel: int, stride: int = 1, groups: int = 1) -> Tensor:
    """A convolution and a batch normalisation with fixed statistics."""
    kind = x.dtype()
    weight = _weight(out, x.shape()[1] // groups, kernel, kernel, dtype=kind)
    output = ark.conv(x, weight, None, stride, kernel // 2, groups=groups, tf32=kind == ark.fp32)
    return ark.batch_norm(output, *(_weight(out, dtype=kind) for _ in range(4)))


def _resnet(images: int, dtype: ark.DataType) -> Tensor:
    """ResNet-18 (He et al. 2016)."""
    x = ark.relu(_convolved(ark.tensor([images, 3, 224, 224], dtype), 64, 7, 2))
    x = ark.max_pool(x, 3, 2, 1)
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            inner = ark.relu(_convolved(x, width, 3, stride))
            short = x if x.shape()[1] == width else _convolved(x, width, 1, stride)
            x = ark.relu(_convolved(inner, width, 3) + short)
    rows = ark.reshape(ark.global_avg_pool(x), [images, 512])
    return ark.linear(rows, _weight(1000, 512, dtype=dtype)) + _weight(1000, dtype=dtype)


def _mobilenet(images: int) -> Tensor:
    """Inverted residuals with depthwise convolutions (Sandler et al. 2018)."""
    x = _convolved(ark.tensor([images, 3, 224, 224], ark.bf16), 32, 3, 2)
    for width, stride in ((16, 1), (24, 2), (24, 1), (32, 2), (32, 1), (64, 2), (64, 1)):
        wide = 6 * x.shape()[1]
        inner = ark.clip(_convolved(x, wide, 1), 0.0, 6.0)
        inner = ark.clip(_convolved(inner, wide, 3, stride, wide), 0.0, 6.0)
        output = _convolved(inner, width, 1)
        x = x + output if stride == 1 and x.shape()[1] == width else output
    return x


def _affine(x: Tensor) -> Tensor:
    width = x.shape()[-1]
    return ark.layernorm(x) * _weight(width) + _weight(width)


def _dense(x: Tensor, out: int) -> Tensor:
    *outer, width = x.shape()
    rows = ark.reshape(x, [math.prod(outer), width])
    return ark.reshape(ark.linear(rows, _weight(out, width)) + _weight(out), [*outer, out])


def _convnext(images: int) -> Tensor:
    """Two blocks of ConvNeXt (Liu et al. 2022): depthwise 7x7, a norm and two matmuls."""
    x = ark.tensor([images, 28, 28, 96], ark.bf16)
    for _ in range(2):
        planes = ark.transpose(x, [0, 3, 1, 2])
        planes = ark.conv(planes, _weight(96, 1, 7, 7), _weight(96), 1, 3, groups=96)
        rows = _affine(ark.transpose(planes, [0, 2, 3, 1]))
        x = x + _dense(ark.gelu(_dense(rows, 384)), 96) * _weight(96)
    return x


def _heads(x: Tensor, heads: int) -> Tensor:
    batch, rows, width = x.shape()
    return ark.transpose(ark.reshape(x, [batch, rows, heads, width // heads]), [0, 2, 1, 3])


def _encoder(
    batch: int, rows: int, layers: int, width: int = 768, masked: bool = True, first: bool = False
) -> Tensor:
    """Transformer layers with attention of plain ops. first: True if norms come before the
    sublayers.
    """
    x = ark.tensor([batch, rows, width], ark.bf16)
    mask = ark.tensor([batch, 1, 1, rows], ark.bf16) if masked else None
    heads = width // 64
    for _ in range(layers):
        inner = _affine(x) if first else x
        q, k, v = (_heads(_dense(inner, width), heads) for _ in range(3))
        scores = ark.matmul(q, k, transpose_other=True) * 0.125
        scores = scores if mask is None else scores + mask
        mixed = ark.transpose(ark.matmul(ark.softmax(scores), v), [0, 2, 1, 3])
        x = x + _dense(ark.reshape(mixed, [batch, rows, width]), width)
        x = x if first else _affine(x)
        inner = _affine(x) if first else x
        x = x + _dense(ark.gelu(_dense(inner, 4 * width)), width)
        x = x if first else _affine(x)
    return x


def _unet(images: int) -> Tensor:
    """A U-Net (Ronneberger et al. 2015) with one step down and one up, and group norms."""

    def block(x: Tensor, out: int) -> Tensor:
        output = ark.conv(x, _weight(out, x.shape()[1], 3, 3), None, 1, 1)
        return ark.silu(ark.group_norm(output, 8, _weight(out), _weight(out)))

    x = block(ark.tensor([images, 4, 64, 64], ark.bf16), 64)
    low = block(block(ark.max_pool(x, 2), 128), 128)
    return block(ark.concat([x, ark.resize(low, [64, 64])], 1), 64)


def _perceptron(rows: int, width: int) -> Tensor:
    x = ark.tensor([rows, width], ark.bf16)
    for _ in range(3):
        x = ark.relu(_dense(x, width))
    return ark.sigmoid(_dense(x, 16))


def _networks() -> list[Program]:
    return [
        _program("network-resnet18-4", partial(_resnet, 4, ark.bf16), False),
        _program("network-resnet18-1-tf32", partial(_resnet, 1, ark.fp32), False),
        _program("network-mobilenet-2", partial(_mobilenet, 2), False),
        _program("network-convnext-blocks-2", partial(_convnext, 2), False),
        _program("network-bert-2-layers-8x128", partial(_encoder, 8, 128, 2), False),
        _program(
            "network-vit-2-layers-8x197",
            partial(_encoder, 8, 197, 2, masked=False, first=True),
            False,
        ),
        _program("network-bert-2-layers-1x16-w256", partial(_encoder, 1, 16, 2, 256)),
        _program("network-unet-2", partial(_unet, 2), False),
        _program("network-perceptron-1", partial(_perceptron, 1, 1024)),
        _program("network-perceptron-256", partial(_perceptron, 256, 1024)),
    ]


def _update(loss: Tensor, parameters: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
    optimizer = ark.optim.AdamW(parameters, 1e-3)
    optimizer.step(ark.grad(loss, optimizer.parameters))


def _learning_perceptron() -> None:
    weights = [ark.parameter([512, 512]) for _ in range(3)]
    x = ark.tensor([128, 512])
    for weight in weights:
        x = ark.silu(ark.linear(x, weight))
    _update(ark.cross_entropy(x, ark.tensor([128], ark.int32)), weights)


def _learning_convnet() -> None:
    weights = [ark.parameter([16, 3, 3, 3]), ark.parameter([32, 16, 3, 3])]
    x = ark.tensor([8, 3, 32, 32])
    for weight in weights:
        x = ark.max_pool(ark.relu(ark.conv(x, weight, None, 1, 1)), 2)
    head = ark.parameter([10, 32])
    rows = ark.reshape(ark.global_avg_pool(x), [8, 32])
    loss = ark.cross_entropy(ark.linear(rows, head), ark.tensor([8], ark.int32))
    _update(loss, [*weights, head])


def _learning_decoder() -> None:
    """A Llama of two layers that trains on 64 tokens per step."""
    from ark.models.llama import Llama

    config = LlamaConfig(256, 1024, 2, 4, 4, 64, 1024, 64)
    model = Llama(config, ark.fp32)
    model.setup(64)
    tokens, start = ark.tensor([65], ark.int32), ark.tensor([1], ark.int32)
    state = ark.TokenState(tokens[0:64], start, start, start, start)
    hidden = ark.rmsnorm(model(state, 64), model.norm, model.eps)
    _update(ark.cross_entropy(model.head(hidden), tokens[1:65]), model.params_dict())


def _training() -> list[Program]:
    return [
        _program("training-perceptron-128x512", _learning_perceptron),
        _program("training-convnet-8x32", _learning_convnet),
        _program("training-decoder-2-layers", _learning_decoder),
    ]


def _ranks(name: str, world: int, make: Callable[[int, int], Any]) -> Program:
    def graphs(machine: Machine) -> list[Graph]:
        graphs = []
        for rank in range(world):
            model = Model(rank, world)
            with use_model(model):
                make(rank, world)
            graphs.append(model.graph)
        return graphs

    return Program(name, graphs, {"lockstep": True}, False)


def _collective(name: str, nbytes: int, world: int, how: str = "one_shot") -> Program:
    def make(rank: int, world: int) -> None:
        call = getattr(ark, name)
        call(ark.tensor([nbytes // 2], ark.bf16, name="x"), rank, world, algorithm=how)

    shown = f"{nbytes >> 20}m" if nbytes >> 20 else f"{nbytes >> 10}k"
    return _ranks(f"{name}-{shown}-{world}-ranks-{how}", world, make)


def _product_and_sum(rank: int, world: int) -> None:
    x, w = ark.tensor([512, 4096 // world], ark.bf16), _weight(4096, 4096 // world)
    ark.all_reduce(ark.linear(x, w), rank, world)


def _sum_and_norm(rank: int, world: int) -> None:
    x = ark.all_reduce(ark.tensor([8, 4096], ark.bf16), rank, world)
    ark.rmsnorm(x + ark.tensor([8, 4096], ark.bf16), _weight(4096))


def _collectives() -> list[Program]:
    return [
        _collective("all_reduce", 16 << 10, 2),
        _collective("all_reduce", 16 << 10, 8),
        _collective("all_reduce", SMALL_BYTES, 8),
        _collective("all_reduce", SMALL_BYTES, 8, "two_shot"),
        _collective("all_gather", SMALL_BYTES, 8),
        _collective("reduce_scatter", SMALL_BYTES, 8),
        _collective("all_to_all", SMALL_BYTES, 8),
        _ranks("product-and-all_reduce-2-ranks", 2, _product_and_sum),
        _ranks("all_reduce-and-rmsnorm-8-ranks", 8, _sum_and_norm),
    ]
