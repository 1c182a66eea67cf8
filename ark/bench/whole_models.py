"""Six whole models from torchvision and transformers, with random weights: typical inputs of
torch.compile. Called by ark.bench.networks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Example = tuple[nn.Module, torch.Tensor]
VOCABULARY_SIZE = 1000  # vocabulary from which tokens are drawn


class FirstTensor(nn.Module):
    """A model of transformers that returns its first result only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens, return_dict=False)[0]


def _images(name: str, count: int, dtype: torch.dtype) -> Example:
    import torchvision.models

    model = getattr(torchvision.models, name)(weights=None)
    return model.to(dtype), torch.randn(count, 3, 224, 224, dtype=dtype)


def _texts(name: tuple[str, str], shape: tuple[int, int], **sizes: Any) -> Example:
    """A model of transformers, in bf16, and tokens of that shape."""
    import transformers

    config = getattr(transformers, f"{name[0]}Config")(**sizes)
    model = getattr(transformers, name[1])(config).to(torch.bfloat16)
    return FirstTensor(model), torch.randint(0, VOCABULARY_SIZE, shape)


def _llama() -> Example:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, **heads}
    return _texts(("Llama", "LlamaForCausalLM"), (2, 512), use_cache=False, **sizes)


MODELS: dict[str, Callable[[], Example]] = {
    "resnet50-16x224": lambda: _images("resnet50", 16, torch.float32),
    "bert-base-8x128": lambda: _texts(("Bert", "BertModel"), (8, 128)),
    "gpt2-124m-4x512": lambda: _texts(("GPT2", "GPT2LMHeadModel"), (4, 512), use_cache=False),
    "vit-b-16-8x224": lambda: _images("vit_b_16", 8, torch.bfloat16),
    "llama-8-layers-2x512": _llama,
    "convnext-tiny-8x224": lambda: _images("convnext_tiny", 8, torch.bfloat16),
}
