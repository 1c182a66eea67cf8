"""Whole models by name, from torchvision, timm, transformers and diffusers if these are installed,
with random weights and inputs of one shape. `ark bench models` measures them. Importing this module
imports none of these packages. Called by ark.cli.measure.networks, ark.cli.bench_models and
ci/figure_pieces.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

TRAINING = "-training"  # follows the name of a model in the figure of its training step
VOCABULARY_SIZE = 1000  # the size of the vocabulary from which tokens are drawn


def _float(name: str, *shape: int) -> torch.Tensor:
    import torch

    return torch.randn(shape, dtype=getattr(torch, name))


def _tokens(*shape: int) -> torch.Tensor:
    import torch

    return torch.randint(0, VOCABULARY_SIZE, shape)


def _images(name: str, count: int, dtype: str = "bfloat16", **sizes: Any) -> Example:
    """A classifier of torchvision, with images of 224 x 224 as its input."""
    import torch
    import torchvision.models

    model = getattr(torchvision.models, name)(weights=None, **sizes)
    return model.to(getattr(torch, dtype)), (_float(dtype, count, 3, 224, 224),)


def _timm(name: str, count: int) -> Example:
    """A classifier of timm, in bf16, with images of 224 x 224 as its input."""
    import timm
    import torch

    return timm.create_model(name).to(torch.bfloat16), (_float("bfloat16", count, 3, 224, 224),)


def _model(package: str, config: str, name: str, sizes: dict[str, Any], **more: Any) -> nn.Module:
    """A model of transformers or diffusers, in bf16. config: the class of a transformers
    configuration.
    """
    import importlib

    import torch

    from ark.cli.measure.model_parts import FirstTensor

    module = importlib.import_module(package)
    kind = getattr(module, name)
    model = kind(getattr(module, config)(**sizes)) if config else kind(**sizes)
    return FirstTensor(model.to(torch.bfloat16), **more)


def _text(name: str, kind: str, shape: Sequence[int], **sizes: Any) -> Example:
    """A model of transformers, with tokens of the given shape as its input."""
    return _model("transformers", f"{name}Config", f"{name}{kind}", sizes), (_tokens(*shape),)


def _signal(name: str, kind: str, shape: Sequence[int], **sizes: Any) -> Example:
    """A model of transformers, with numbers of the given shape as its input."""
    model = _model("transformers", f"{name}Config", f"{name}{kind}", sizes)
    return model, (_float("bfloat16", *shape),)


def _llama() -> Example:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, **heads}
    return _text("Llama", "ForCausalLM", (2, 512), use_cache=False, **sizes)


def _padded() -> Example:
    """BERT, with texts of different lengths as its input."""
    import torch

    model, (tokens,) = _text("Bert", "Model", (8, 128))
    lengths = torch.tensor([128, 100, 60, 20, 128, 90, 80, 70])
    return model, (tokens, (torch.arange(128) < lengths[:, None]).long())


def _t5() -> Example:
    """T5's encoder and decoder."""
    sizes = {"d_model": 512, "num_layers": 6, "num_heads": 8, "d_ff": 2048, "use_cache": False}
    model = _model("transformers", "T5Config", "T5Model", sizes)
    import torch

    tokens, ones = _tokens(4, 128), torch.ones(4, 128, dtype=torch.int64)
    return model, (tokens, ones, _tokens(4, 128))


def _whisper() -> Example:
    """The encoder of Whisper tiny, with 30 s of sound as its input."""
    heads = {"encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
    sizes = {"d_model": 384, "encoder_layers": 4, **heads}
    package = "transformers.models.whisper.modeling_whisper"
    model = _model(package, "WhisperConfig", "WhisperEncoder", sizes)
    return model, (_float("bfloat16", 1, 80, 3000),)


def _detr() -> Example:
    """DETR, a detection model: a convolutional network, and an encoder and a decoder over its
    features.
    """
    from transformers import ResNetConfig

    stages: dict[str, Any] = {"out_features": ["stage4"]}
    sizes = {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": ResNetConfig(**stages),
    }
    model = _model("transformers", "DetrConfig", "DetrForObjectDetection", sizes)
    return model, (_float("bfloat16", 1, 3, 512, 512),)


def _unet() -> Example:
    """Stable Diffusion's denoiser (Rombach et al. 2022), on latents of 64 x 64."""
    import torch

    sizes = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
    model = _model("diffusers", "", "UNet2DConditionModel", sizes)
    latents, text = _float("bfloat16", 2, 4, 64, 64), _float("bfloat16", 2, 77, 768)
    return model, (latents, torch.tensor([10, 500]), text)


def _dit() -> Example:
    """A diffusion transformer (Peebles and Xie 2023), DiT-S/2."""
    import torch

    sizes = {"num_attention_heads": 6, "attention_head_dim": 64, "num_layers": 12}
    model = _model("diffusers", "", "DiTTransformer2DModel", {**sizes, "sample_size": 32})
    places = (torch.tensor([10, 500]), torch.tensor([1, 2]))
    return model, (_float("bfloat16", 2, 4, 32, 32), *places)


def _decoder() -> Example:
    """The decoder of Stable Diffusion's autoencoder."""
    channels = (128, 256, 512, 512)
    sizes = {
        "latent_channels": 4,
        "block_out_channels": channels,
        "layers_per_block": 2,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    model = _model("diffusers", "", "AutoencoderKL", sizes)
    return model, (_float("bfloat16", 1, 3, 256, 256),)


def _dlrm() -> Example:
    from ark.cli.measure.model_parts import Recommender

    return Recommender(), (_float("float32", 256, 13), _tokens(256, 26))


def _gat(nodes: int = 1024) -> Example:
    import torch

    from ark.cli.measure.model_parts import GraphAttention

    edges = (torch.rand(nodes, nodes) < 0.01) | torch.eye(nodes, dtype=torch.bool)
    return GraphAttention(128, 16, 8, 7), (_float("float32", nodes, 128), edges)


STANDARD: dict[str, Callable[[], Example]] = {
    "resnet50-16x224": partial(_images, "resnet50", 16, "float32"),
    "bert-base-8x128": partial(_text, "Bert", "Model", (8, 128)),
    "gpt2-124m-4x512": partial(_text, "GPT2", "LMHeadModel", (4, 512), use_cache=False),
    "vit-b-16-8x224": partial(_images, "vit_b_16", 8),
    "llama-8-layers-2x512": _llama,
    "convnext-tiny-8x224": partial(_images, "convnext_tiny", 8),
}
"""The models whose times the project publishes (ci/figure_pieces.py)."""

MODELS: dict[str, Callable[[], Example]] = {
    **STANDARD,
    "resnet18-16x224": partial(_images, "resnet18", 16, "float32"),
    "efficientnet-b0-16x224": partial(_images, "efficientnet_b0", 16),
    "mobilenet-v3-large-16x224": partial(_images, "mobilenet_v3_large", 16),
    "densenet121-8x224": partial(_images, "densenet121", 8),
    "regnet-y-400mf-16x224": partial(_images, "regnet_y_400mf", 16),
    "swin-t-8x224": partial(_images, "swin_t", 8),
    "deit3-small-8x224": partial(_timm, "deit3_small_patch16_224", 8),
    "mixer-b-16-8x224": partial(_timm, "mixer_b16_224", 8),
    "mobileone-s1-16x224": partial(_timm, "mobileone_s1", 16),
    "bert-base-padded-8x128": _padded,
    "roberta-base-8x128": partial(_text, "Roberta", "Model", (8, 128)),
    "distilbert-8x128": partial(_text, "DistilBert", "Model", (8, 128)),
    "electra-small-8x128": partial(_text, "Electra", "Model", (8, 128)),
    "opt-125m-4x512": partial(_text, "OPT", "ForCausalLM", (4, 512), use_cache=False),
    "mamba-130m-1x256": partial(_text, "Mamba", "ForCausalLM", (1, 256), use_cache=False),
    "t5-small-4x128": _t5,
    "whisper-tiny-encoder-1": _whisper,
    "wav2vec2-base-1x16000": partial(_signal, "Wav2Vec2", "Model", (1, 16000)),
    "clip-vision-b-32-8x224": partial(_signal, "CLIPVision", "Model", (8, 3, 224, 224)),
    "detr-resnet50-1x512": _detr,
    "stable-diffusion-unet-2x64": _unet,
    "stable-diffusion-autoencoder-1x256": _decoder,
    "dit-s-2-2x32": _dit,
    "dlrm-256": _dlrm,
    "gat-1024": _gat,
}
