"""Five small models of common kinds: ResNet-18's shape, MobileNet's, an LSTM, and transformers'
BERT and GPT-2. Weights are from a seed.

python -m tests.interop.models

runs each by torch.compile(backend="ark"), ark.from_torch and ONNX on the CPU and compares it with
torch.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import ark
from ark.cli.measure import networks
from ark.cli.measure.networks import seasoned
from ark.interop.torch import backend

RELATIVE_TOLERANCE = 2e-5


class First(nn.Module):
    """A module that wraps a transformers model and returns its first result alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False, return_dict=False)[0]


def bert() -> tuple[nn.Module, torch.Tensor]:
    """Returns a model of BERT-tiny's shape."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return First(BertModel(config)), torch.randint(0, 100, (2, 12))


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    """Returns a tiny model of GPT-2's shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    return First(GPT2LMHeadModel(config)), torch.randint(0, 100, (1, 12))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet": networks.resnet,
    "mobilenet": networks.mobilenet,
    "lstm": networks.lstm,
    "bert": bert,
    "gpt2": gpt2,
}


def seasoned_model(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Returns a model in eval mode whose batch norms have statistics of some input, and its
    input.
    """
    torch.manual_seed(3)
    module, example = MODELS[name]()
    return seasoned(module), example


def compiled(module: nn.Module, example: torch.Tensor) -> torch.Tensor:
    """Returns the result by torch.compile."""
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        return torch.compile(module, backend=backend)(example)


def exported(module: nn.Module, example: torch.Tensor) -> torch.Tensor:
    """Returns the result by ark.from_torch, which traces with torch.export."""
    return ark.from_torch(module, (example,))(example)


def onnx(module: nn.Module, example: torch.Tensor) -> Any:
    """Exports the module to an ONNX file and returns ark's result for the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = torch.onnx.export(module, (example,), dynamo=True, verbose=False)
        result.save(str(path))
        model = ark.from_onnx(path)
        (actual,) = model(example.numpy())
        model.close()
        return torch.from_numpy(actual)


WAYS = {"compile": compiled, "export": exported, "onnx": onnx}


def difference(name: str, way: str) -> float:
    """Returns the largest relative difference of a model's results from torch's, by the given way
    into ark.
    """
    module, example = seasoned_model(name)
    with torch.no_grad():
        want = module(example)
    got = WAYS[way](module, example)
    assert got.shape == want.shape and got.dtype == want.dtype
    return float(((got - want).abs() / (1 + want.abs())).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    args = parser.parse_args()
    ark.init(backend="cpu")
    worst = 0.0
    for name in args.names:
        for way in args.ways:
            apart = difference(name, way)
            worst = max(worst, apart)
            print(f"{name} by {way}: {apart:.1e}", flush=True)
    if not worst < RELATIVE_TOLERANCE or not np.isfinite(worst):
        raise SystemExit(f"a model differs from torch by {worst:.1e}")


if __name__ == "__main__":
    main()
