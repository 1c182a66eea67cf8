"""Opens and validates a checkpoint directory on disk, and reads its tensors.

`ark generate` opens the checkpoint before it plans. Weights are read by ark's own names
(`layers.3.attention.query`), completely or by slices for a tensor-parallel rank. Opening and
validating reads only headers; weights are read on demand, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ark import log
from ark.errors import InvalidUsageError, ModelError
from ark.ir.dtype import DataType
from ark.models.build import parameters
from ark.models.config import LlamaConfig, with_cache
from ark.models.formats.base import QuantizedTensor, find
from ark.models.formats.layout import Codes
from ark.models.formats.on_load import OnLoad
from ark.models.gguf_file import find_gguf_tensors, is_gguf, read_config, read_gguf, reordered
from ark.models.holding import held, layouts_on_load, stacked_name
from ark.models.registry import decoder
from ark.models.rope import Rope, inverse_frequencies
from ark.models.shards import DTYPES, StoredTensor, find_tensors, read_bytes
from ark.models.stored import Stored
from ark.models.tied import untied

FREQUENCIES = ".rotary_emb.inv_freq"
"""The suffix of rotary frequencies, which older checkpoints store although the config has them."""
FLOAT_TYPES = {dtype.name: dtype for dtype in DTYPES.values()}


@dataclass(frozen=True)
class Weight:
    """One weight of a model. name: ark's name. stored_name: the name of the stored tensor. shape:
    the weight's shape; its rows are outputs.

    stored: the rows of the stored tensor of which the weight consists; None for the whole tensor.
    """

    name: str
    stored_name: str
    shape: tuple[int, ...]
    stored: Stored | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor of this weight."""
        return self.stored.shape(self.shape) if self.stored else self.shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """`stored_shape` with outputs before inputs, as formats of quantised weights require."""
        return self.stored.whole(self.shape) if self.stored else self.shape


def model_weights(config: LlamaConfig) -> tuple[Weight, ...]:
    """All weights of a checkpoint with this config. A module's own weights precede those of its
    submodules.

    If the decoder's WEIGHTS gives a parameter's name an additional number, each index of its first
    dimension is a weight, as `layers.0.mlp.gate.3`. With tied embeddings `head.weight` and
    `embedding` have the same stored tensor.
    """
    kind = decoder(config.architecture)
    table, listed = kind.WEIGHTS, []
    for name, shape in parameters(config).items():
        numbers = [part for part in name.split(".") if part.isdigit()]
        pattern = ".".join("{}" if part.isdigit() else part for part in name.split("."))
        if len(shape) == 3 and (many := table.get(pattern + ".{}")):
            rows = range(shape[0])
            listed += [Weight(f"{name}.{i}", many.format(*numbers, i), shape[1:]) for i in rows]
            continue
        tied = name == "head.weight" and config.tie_word_embeddings
        stored = kind.stored_name(config, "embedding" if tied else pattern).format(*numbers)
        listed.append(Weight(name, stored, shape, kind.stored(config, pattern)))
    return tuple(listed)


class Checkpoint:
    """An opened checkpoint directory. `config` is the model's shape, `weights` lists its
    weights.
    """

    def __init__(
        self,
        directory: Path,
        config: LlamaConfig,
        stored: dict[str, StoredTensor],
        reordered: Mapping[str, Stored] | None = None,
    ) -> None:
        self.directory = directory
        self.config = config
        self.weights = {weight.name: weight for weight in model_weights(config)}
        for name, rows in (reordered or {}).items():
            self.weights[name] = replace(self.weights[name], stored=rows)
        self.stored = stored
        self.quantized: dict[str, QuantizedTensor] = {}
        self.on_load: OnLoad | None = None
        self._decoded: tuple[str, Codes | npt.NDArray[np.float32]] | None = None
        if config.format is not None:
            for name, weight in self.weights.items():
                tensor = find(config.format, weight.stored_name, weight.whole_shape, stored)
                if tensor is not None:
                    self.quantized[name] = tensor

    @classmethod
    def open(
        cls, directory: str | Path, quantize: str | None = None, kv_cache_dtype: str = "auto"
    ) -> Checkpoint:
        """Reads the config and the safetensors headers, or a GGUF file, and checks both against
        each other.

        quantize: a format of ark.models.formats.on_load to which weights of linear layers are
        quantised while they are loaded; None: not. kv_cache_dtype: the type of keys and values in
        the cache, as of ark.models.config.with_cache.

        Raises ModelError if a file is missing, damaged or contradictory, and UnsupportedError if
        ark does not support the model or the format.
        """
        path = Path(directory)
        file = read_gguf(path) if is_gguf(path) else None
        config = read_config(file) if file else LlamaConfig.from_directory(path)
        stored = find_gguf_tensors(file) if file else with_prefix(find_tensors(path))
        # The number of layers is checked before weights are listed, because a wrong number could
        # make the list endless.
        if config.num_hidden_layers > len(stored):
            raise ModelError(
                f"config.json of {path} says {config.num_hidden_layers} layers, but the weights "
                f"are {len(stored)} tensors in all. Correct num_hidden_layers, or download the "
                "weights that belong to it."
            )
        orders = reordered(file, config) if file else None
        checkpoint = cls(path, untied(config, stored), stored, orders)
        checkpoint.validate()
        checkpoint.hold(quantize)
        dtype = DataType.from_numpy(checkpoint.dtype)
        checkpoint.config = with_cache(checkpoint.config, kv_cache_dtype, dtype)
        return checkpoint

    def hold(self, quantize: str | None) -> None:
        """Sets the config's `layouts`: how ark stores quantised weights. quantize: see `open`."""
        shapes = {name: weight.shape for name, weight in self.weights.items()}
        where = str(self.directory)
        if quantize is not None:
            self.on_load, layouts = layouts_on_load(
                self.config, shapes, self.quantized, quantize, where
            )
        else:
            layouts = held(shapes, self.quantized, where)
        self.config = replace(self.config, layouts=tuple(layouts.items()))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of weights that are not quantised: float32, float16 or ml_dtypes.bfloat16."""
        if self.config.format is not None and self.config.dtype is not None:
            return FLOAT_TYPES[self.config.dtype]
        if "embedding" in self.quantized:
            return FLOAT_TYPES["float16"]
        return self.stored[self.weights["embedding"].stored_name].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory; tied embeddings count once."""
        layouts, size = dict(self.config.layouts), self.dtype.itemsize
        tied = self.config.tie_word_embeddings
        return sum(
            size * prod(weight.shape) if layout is None else layout.nbytes(weight.shape)
            for name, weight in self.weights.items()
            if not (tied and name == "head.weight")
            for layout in [layouts.get(name) or layouts.get(stacked_name(name))]
        )

    @property
    def position_nbytes(self) -> int:
        """The bytes of one position's keys and values in all layers."""
        rows, width = self.config.cache_rows
        dtype = self.config.cache_type(DataType.from_numpy(self.dtype))
        return dtype.nbytes(width) * rows * self.config.num_hidden_layers

    def validate(self) -> None:
        """Raises ModelError unless the files hold exactly the config's tensors, all of one type."""
        needed = {
            weight.stored_name: weight
            for name, weight in self.weights.items()
            if name not in self.quantized
        }
        pieces = {t.name for q in self.quantized.values() for t in q.pieces.values()}
        missing = [name for name in needed if name not in self.stored]
        if missing:
            raise ModelError(
                f"{self.directory} lacks {describe(missing)}, which its config.json requires "
                f"({self.config.num_hidden_layers} layers, tie_word_embeddings "
                f"{str(self.config.tie_word_embeddings).lower()}). Correct the config, or "
                "download the weights that belong to it."
            )
        extra = [
            name
            for name in self.stored
            if name not in needed and name not in pieces and not self._implied(name)
        ]
        if extra:
            raise ModelError(
                f"{self.directory} holds {describe(extra)}, which a model of its config.json "
                f"({self.config.num_hidden_layers} layers) does not have. Correct the config, or "
                "download the weights that belong to it."
            )
        for name, weight in needed.items():
            tensor = self.stored[name]
            if tensor.shape != weight.stored_shape:
                raise ModelError(
                    f"{tensor.path} holds {name} with shape {list(tensor.shape)}, but "
                    f"config.json requires {list(weight.stored_shape)}. Correct the config, or "
                    "download the weights that belong to it."
                )
        expected = self.config.dtype or self.dtype.name
        for name in needed:
            tensor = self.stored[name]
            if self.config.format is not None and tensor.dtype_code in DTYPES:
                continue  # if weights are quantised, norms and biases may have another type
            if tensor.dtype.name != expected:
                source = "config.json says" if self.config.dtype else "the embedding is"
                raise ModelError(
                    f"{tensor.path} holds {name} as {tensor.dtype.name}, but {source} {expected}; "
                    "all weights should be of that type. Correct dtype (or torch_dtype) in "
                    "config.json, or convert the weights."
                )

    def read(self, name: str, *share: slice) -> npt.NDArray[Any]:
        """A parameter by ark's name, or a part of it, as a new array.

        share: slices of its dimensions; of the first dimension only the slice is read. Raises
        ModelError if the file has been truncated since it was opened. The file is not mapped,
        because access to a truncated part of a mapped file would end the process.
        """
        if f"{name}.0" in self.weights:
            first, *others = share or (slice(None),)
            count = sum(1 for i in range(len(self.weights)) if f"{name}.{i}" in self.weights)
            return np.stack([self.read(f"{name}.{i}", *others) for i in range(count)[first]])
        if name not in self.weights:
            raise InvalidUsageError(
                f"The checkpoint has no weight {name!r}; its weights are named as model_weights() "
                f"lists them: {', '.join(list(self.weights)[:3])}, ... Use one of these names."
            )
        if name in self.quantized and (stored := self.weights[name].stored) and stored.folded:
            decoded = self._decode(name)
            values = decoded if isinstance(decoded, np.ndarray) else decoded.floats()
            return stored.of_experts(values).astype(self.dtype)[share]
        if name in self.quantized and len(self.weights[name].shape) == 3:
            values = np.stack([codes.floats() for codes in self.experts(name)])
            return values.astype(self.dtype)[share]
        if name in self.quantized:
            decoded = self._whole(name)
            values = decoded if isinstance(decoded, np.ndarray) else decoded.floats()
            return values.astype(self.dtype)[share]
        tensor, stored = self.stored[self.weights[name].stored_name], self.weights[name].stored
        first, *others = share or (slice(None),)
        if stored and stored.axis:
            each = stored.rows_in_all if stored.folded else 1
            begin, end, _ = slice(
                *(None if n is None else n * each for n in (first.start, first.stop))
            ).indices(tensor.shape[0])
            index = (slice(None), *others)
            return stored.of_experts(self._rows(tensor, begin, end))[index]
        if stored:
            begin, end, places = stored.span(first)
            index = (slice(None), *others)
            return stored.adjust(self._rows(tensor, begin, end)[places][index])
        begin, end, step = first.indices(tensor.shape[0])
        if step != 1 or end <= begin:
            begin, end, others = 0, tensor.shape[0], list(share)
        else:
            others = [slice(None), *others]
        return self._rows(tensor, begin, end)[tuple(others)]

    def codes(self, name: str) -> Codes:
        """Reads a whole parameter that the config's layouts keep in memory as quantised codes."""
        if self.on_load is not None:
            layouts = dict(self.config.layouts)
            layout = layouts.get(name) or layouts[stacked_name(name)]
            return self.on_load.encode(self.read(name), layout.group)
        decoded = self._whole(name)
        assert isinstance(decoded, Codes)
        return decoded

    def experts(self, name: str) -> Iterator[Codes]:
        """Yields each expert's codes for a parameter (experts, outputs, inputs) held as codes."""
        if f"{name}.0" in self.weights:
            count = sum(1 for i in range(len(self.weights)) if f"{name}.{i}" in self.weights)
            yield from (self.codes(f"{name}.{i}") for i in range(count))
            return
        if self.on_load is not None:
            group = dict(self.config.layouts)[name].group
            yield from (self.on_load.encode(values, group) for values in self.read(name))
            return
        weight = self.weights[name]
        decoded, (count, outputs, _) = self._decode(name), weight.whole_shape
        assert isinstance(decoded, Codes)
        rows = np.asarray(weight.stored.rows if weight.stored else range(outputs), np.intp)
        yield from (decoded.rows(expert * outputs + rows) for expert in range(count))

    def _whole(self, name: str) -> Codes | npt.NDArray[np.float32]:
        """Reads a quantised parameter as `QuantizedTensor.decode` returns it: codes or values."""
        decoded, stored = self._decode(name), self.weights[name].stored
        if stored is None:
            return decoded
        rows = np.asarray(stored.rows, np.intp)
        return decoded[rows] if isinstance(decoded, np.ndarray) else decoded.rows(rows)

    def _decode(self, name: str) -> Codes | npt.NDArray[np.float32]:
        """Decodes the stored tensor of a quantised parameter. The last result is kept, because
        callers read codes, scales and other parameters of one tensor one after another.
        """
        tensor = self.quantized[name]
        if self._decoded is None or self._decoded[0] != tensor.name:
            self._decoded = (tensor.name, tensor.decode())
        return self._decoded[1]

    def _rows(self, tensor: StoredTensor, begin: int, end: int) -> npt.NDArray[Any]:
        """Reads rows `begin` to `end` of a stored tensor, in the order of the file."""
        row = tensor.nbytes // tensor.shape[0]
        data = read_bytes(tensor, begin * row, (end - begin) * row)
        array: npt.NDArray[Any] = data.view(tensor.dtype).reshape(end - begin, *tensor.shape[1:])
        return array

    def __iter__(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Each weight with its name, in model order; a tied head is listed as `embedding` only."""
        whole = {name for name, _ in self.distinct()}
        for name, weight in self.weights.items():
            if name in whole or weight.stored:
                yield name, self.read(name)

    def distinct(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yields each stored tensor once, with ark's name for it, in model order. A quantised
        weight's codes have the weight's name; its other tensors have `name:suffix`.
        """
        seen: set[str] = set()
        for name, weight in self.weights.items():
            if weight.stored_name in seen:
                continue
            seen.add(weight.stored_name)
            if name not in self.quantized:
                yield name, self.stored[weight.stored_name]
                continue
            first, *others = self.quantized[name].pieces.items()
            yield name, first[1]
            yield from ((f"{name}:{end}", tensor) for end, tensor in others)

    def _implied(self, stored_name: str) -> bool:
        """True if a stored tensor that is not a parameter may be ignored. There are three kinds:
        tensors that the decoder does not use; a head equal to the embedding (`untied`); and rotary
        frequencies, because those of the config are used, as in transformers.
        """
        kind = decoder(self.config.architecture)
        if kind.unused(self.config, stored_name):
            return True
        if stored_name.endswith(FREQUENCIES):
            self._compare_frequencies(self.stored[stored_name])
            return True
        return self.config.tie_word_embeddings and stored_name == kind.WEIGHTS["head.weight"]

    def _compare_frequencies(self, tensor: StoredTensor) -> None:
        """Warns unless the stored rotary frequencies equal those of config.json, with or without
        their scaling, within the precision of the stored type.
        """
        rope, width = self.config.rope, self.config.head_dim
        right = [inverse_frequencies(r, width) for r in (rope, Rope(rope.theta))]
        known = tensor.dtype_code in DTYPES and tensor.shape == right[0].shape
        if known:
            stored = read_bytes(tensor, 0, tensor.nbytes).view(tensor.dtype).astype(np.float32)
            room = 1e-5 if tensor.dtype_code == "F32" else 1e-2
            known = any(np.allclose(stored, values, room, 1e-7) for values in right)
        if not known:
            log.warn(
                f"{tensor.path} holds {tensor.name}, which differs from the rotary frequencies of "
                "config.json; those of config.json are used, as transformers does"
            )


def with_prefix(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by the names that a model with a head has. Embedding models are stored without a
    head, and without the prefix `model.` in names.
    """
    bare = "embed_tokens.weight" in stored
    return {f"model.{name}": tensor for name, tensor in stored.items()} if bare else stored


def describe(names: list[str]) -> str:
    """Names as text for messages: the first three, and the number of the others."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
