"""Reads adapters in PEFT's format (adapter_config.json and adapter_model.safetensors) and checks
them against their checkpoint. Called by ark.serving.loading and `ark serve`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.models.adapted import DOWN, UP, Adapters
from ark.models.checkpoint import Checkpoint, describe
from ark.models.fields import Fields
from ark.models.shards import StoredTensor, read_array, read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_ADAPTERS, MAX_RANK = 256, 512
TARGET = re.compile(r"layers\.\d+\.(attention\.(query|key|value|output)|mlp\.(gate|up|down))")
STORED = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "layers_pattern": ([], "layers", ["layers"]),
}
"""The fields of an adapter's config that could change its results. For each, the values that ark
supports. null is supported as well.
"""
READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
}
WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "velora_config",
}
"""Fields of an adapter's config that concern only training, or that have an effect only if a field
of NEUTRAL is set. Any other field that is set is refused.
"""


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter (LoRA). tensors: for each weight's name, the two matrices (rank, inputs)
    and (outputs, rank). The second matrix is multiplied by `scale`.
    """

    name: str
    rank: int
    scale: float
    tensors: Mapping[str, tuple[StoredTensor, StoredTensor]]


@dataclass(frozen=True)
class AdapterSet:
    """The adapters of a loaded model. They are numbered from 1 on."""

    adapters: tuple[Adapter, ...]

    @classmethod
    def open(cls, directories: Mapping[str, Path | str], checkpoint: Checkpoint) -> AdapterSet:
        """Reads the configs and the file headers of adapters. directories: the directory of each
        adapter, by name. Raises ModelError, UnsupportedError or InvalidUsageError if an adapter
        cannot be used with the checkpoint.
        """
        if not isinstance(directories, Mapping) or not all(
            isinstance(name, str) and name and isinstance(where, str | os.PathLike)
            for name, where in directories.items()
        ):
            raise InvalidUsageError(
                f"the adapters are {directories!r:.100}; give a mapping from names that are not "
                "empty to directories"
            )
        if len(directories) > MAX_ADAPTERS:
            raise InvalidUsageError(
                f"{len(directories)} adapters are too many; give at most {MAX_ADAPTERS}"
            )
        opened = (read_adapter(n, Path(where), checkpoint) for n, where in directories.items())
        return cls(tuple(opened))

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters' names, in the order of their numbers."""
        return tuple(adapter.name for adapter in self.adapters)

    @property
    def shape(self) -> Adapters | None:
        """The number, rank and targets of the adapters, from which the graph is built. None if
        there are no adapters.
        """
        if not self.adapters:
            return None
        targets = {name for adapter in self.adapters for name in adapter.tensors}
        rank = max(adapter.rank for adapter in self.adapters)
        return Adapters(len(self.adapters) + 1, rank, tuple(sorted(targets, key=_order)))

    @property
    def nbytes(self) -> int:
        """The approximate bytes of the adapters in memory."""
        matrices = (m for a in self.adapters for pair in a.tensors.values() for m in pair)
        return sum(matrix.nbytes for matrix in matrices)

    def arrays(self, dtype: npt.DTypeLike) -> Mapping[str, Any]:
        """For each parameter of the adapters, a function that reads the matrices of all adapters
        for it.
        """
        shape = self.shape
        if shape is None:
            return {}
        readers = {}
        for target in shape.targets:
            for place, end in enumerate((DOWN, UP)):
                readers[target + end] = lambda t=target, p=place: self._read(t, p, shape, dtype)
        return readers

    def _read(self, target: str, place: int, shape: Adapters, dtype: npt.DTypeLike) -> np.ndarray:
        """The matrices of all adapters for one weight, in one array. They are zero for an adapter
        that does not change this weight.
        """
        pairs = [a.tensors.get(target) for a in self.adapters]
        known = next(pair for pair in pairs if pair is not None)[place].shape
        each = (shape.rank, known[1]) if place == 0 else (known[0], shape.rank)
        values = np.zeros((shape.count, *each), dtype)
        for number, (adapter, pair) in enumerate(zip(self.adapters, pairs, strict=True), 1):
            if pair is not None:
                matrix = read_array(pair[place]).astype(np.float64)
                with np.errstate(over="ignore"):
                    scaled = (matrix * adapter.scale if place else matrix).astype(dtype)
                if not np.isfinite(scaled.astype(np.float32)).all():
                    raise ModelError(
                        f"the adapter {adapter.name!r:.60} has values for {target} that are not "
                        f"finite in {np.dtype(dtype)}, its scale {adapter.scale:.3g} included; "
                        "train or save it again"
                    )
                values[number, : matrix.shape[0], : matrix.shape[1]] = scaled
        return values


def read_adapter(name: str, directory: Path, checkpoint: Checkpoint) -> Adapter:
    """Reads the adapter in a directory."""
    if not directory.is_dir():
        raise ModelError(
            f"the adapter {name!r:.60} should be in {directory}, which is not a directory; give "
            f"one that holds {CONFIG} and {WEIGHTS}"
        )
    fields = Fields.read(directory / CONFIG)
    if fields.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{fields.source}: peft_type is {fields.get('peft_type')!r:.60}, but ark supports "
            "adapters of the type LORA only"
        )
    for field, value in fields.values.items():
        if field in READ or field in WITHOUT_EFFECT:
            continue
        if field not in NEUTRAL and not value:
            continue
        if value is not None and value not in NEUTRAL.get(field, ()):
            raise UnsupportedError(
                f"{fields.source}: {field} is {value!r:.60}, which ark does not support in "
                "adapters; merge the adapter into the checkpoint (PEFT's merge_and_unload)"
            )
    rank, alpha = fields.size("r"), fields.number("lora_alpha", 8.0)
    if rank > MAX_RANK:
        raise fields.wrong("r", f"at most {MAX_RANK}")
    scale = alpha / (math.sqrt(rank) if fields.flag("use_rslora", False) else rank)
    if not (directory / WEIGHTS).exists():
        raise ModelError(
            f"{directory} has no {WEIGHTS}; download it, or save the adapter with safetensors"
        )
    pairs = dict(_pairs(read_header(directory / WEIGHTS), directory, checkpoint, rank, fields))
    return Adapter(name, rank, scale, pairs)


def _check_modules(fields: Fields, modules: Sequence[str]) -> None:
    """Raises ModelError if the files have matrices for a module that the config does not list,
    because PEFT would not apply them. The config has a list of names, each of which is the end of a
    module's path, or a single string, which is a pattern.
    """
    layers = fields.get("layers_to_transform")
    excluded = fields.get("exclude_modules")
    for module in modules:
        fits = fields.get("target_modules") in (None, "all-linear") or _named(
            "target_modules", module, fields
        )
        if excluded and _named("exclude_modules", module, fields):
            fits = False
        layer = re.search(r"\.layers\.(\d+)\.", module)
        chosen = layers if isinstance(layers, list) else [layers]
        if layer and layers is not None:
            fits = fits and int(layer.group(1)) in chosen
        if not fits:
            raise ModelError(
                f"{fields.source}: target_modules, exclude_modules and layers_to_transform leave "
                f"{module} out, but {WEIGHTS} has matrices for it; use the two files that were "
                "saved together"
            )


def _named(field: str, module: str, fields: Fields) -> bool:
    """True if the module is listed in the field, which is a list of names or a pattern."""
    value = fields.get(field)
    if isinstance(value, list):
        return any(module == end or module.endswith(f".{end}") for end in value)
    try:
        return isinstance(value, str) and re.fullmatch(value, module) is not None
    except re.error as error:
        raise fields.wrong(field, "a pattern or a list of names") from error


def _pairs(
    stored: Mapping[str, StoredTensor],
    directory: Path,
    checkpoint: Checkpoint,
    rank: int,
    fields: Fields,
) -> Iterator[tuple[str, tuple[StoredTensor, StoredTensor]]]:
    """Yields the name of each weight with its two matrices. Raises an error if a shape does not fit
    the checkpoint, or the layer cannot be adapted.
    """
    matches = {name: STORED.fullmatch(name) for name in stored}
    others = [name for name, match in matches.items() if match is None]
    if others or not stored:
        raise UnsupportedError(
            f"{directory / WEIGHTS} holds {describe(others) if others else 'nothing'}, but ark "
            "reads the matrices lora_A and lora_B of linear layers only"
        )
    modules = list(dict.fromkeys(match.group(1) for match in matches.values() if match))
    _check_modules(fields, modules)
    weights = {weight.stored_name: weight for weight in checkpoint.weights.values()}
    for module in modules:
        weight = weights.get(f"{module}.weight")
        if weight is None or weight.stored or not TARGET.fullmatch(weight.name):
            raise UnsupportedError(
                f"{directory} adapts {module}, but in this checkpoint ark supports adapters of "
                "the attention's and the feed-forward part's own linear layers only; merge the "
                "adapter into the checkpoint (PEFT's merge_and_unload)"
            )
        pair = [stored.get(f"base_model.model.{module}.lora_{side}.weight") for side in "AB"]
        outputs, inputs = weight.shape
        for side, tensor, shape in zip("AB", pair, ((rank, inputs), (outputs, rank)), strict=True):
            if tensor is None or tensor.shape != shape:
                holds = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
                raise ModelError(
                    f"{directory / WEIGHTS}: lora_{side} of {module} {holds}, but {CONFIG} and "
                    f"the checkpoint require {list(shape)}; use the adapter with the model that it "
                    "was trained for"
                )
            assert tensor.dtype
        yield weight.name, (pair[0], pair[1])  # type: ignore[misc]


def _order(name: str) -> tuple[int, str]:
    """A sort key for weights: by layer, then by name."""
    return int(name.split(".")[1]), name
