"""Which weights of a checkpoint ark holds as codes, and which as floats, with a warning. Called by
ark.models.checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ark import log
from ark.errors import InvalidUsageError
from ark.models.build import parameters
from ark.models.config import LlamaConfig
from ark.models.formats.base import QuantizedTensor
from ark.models.formats.layout import Layout
from ark.models.formats.on_load import OnLoad, on_load
from ark.models.registry import decoder

Shapes = Mapping[str, Sequence[int]]


def held(
    config: LlamaConfig, shapes: Shapes, quantized: Mapping[str, QuantizedTensor], where: str
) -> dict[str, Layout]:
    """The layouts of the parameters of linear layers that a checkpoint has quantised. shapes: of
    all weights by ark's names; quantized: those of them that are. The others are dequantised when
    they are loaded, which a warning says.
    """
    layouts, floats = {}, []
    for name, tensor in quantized.items():
        layout = tensor.layout() if name != "embedding" and len(shapes[name]) == 2 else None
        if layout is None or _is_expert(name):
            floats.append(name)
        else:
            layouts[name] = layout
    if floats:
        kinds = sorted({quantized[name].format.name for name in floats})
        log.warn(
            f"{where}: loading dequantises {_listed(floats)}, {len(floats)} of {len(quantized)} "
            f"quantised weights ({', '.join(kinds)}), because ark has no product with them in that "
            "form; nothing is saved for these"
        )
    return layouts


def layouts_on_load(
    config: LlamaConfig,
    shapes: Shapes,
    quantized: Mapping[str, QuantizedTensor],
    name: str,
    where: str,
) -> tuple[OnLoad, dict[str, Layout]]:
    """The format of that name, and the layouts of the parameters that are brought into it: those of
    linear layers, without the head and routers.
    """
    chosen = on_load(name)
    if quantized:
        kind = next(iter(quantized.values())).format.name
        raise InvalidUsageError(
            f"the weights of {where} are already quantised ({kind}); omit quantize={name!r}, or "
            "use the checkpoint that is not quantised"
        )
    layouts, floats = {}, []
    unquantized = decoder(config.architecture).UNQUANTIZED
    for parameter, shape in shapes.items():
        pattern = ".".join("{}" if part.isdigit() else part for part in parameter.split("."))
        if len(shape) != 2 or pattern in unquantized:
            continue
        layout = chosen.layout(shape)
        if layout is None or _is_expert(parameter):
            floats.append(parameter)
        else:
            layouts[parameter] = layout
    if floats:
        log.warn(
            f"{_listed(floats)} of {where} remain as they are stored, because ark has no product "
            f"with them in {name} (experts, or rows that are not a multiple of 8 elements)"
        )
    return chosen, layouts


def quantised_config(config: LlamaConfig, name: str | None, where: str) -> LlamaConfig:
    """A shape without a checkpoint, whose weights would be brought into the format of that name;
    None: as it is.
    """
    if name is None:
        return config
    _, layouts = layouts_on_load(config, parameters(config), {}, name, where)
    return replace(config, layouts=tuple(layouts.items()))


def _is_expert(parameter: str) -> bool:
    """True for one of the tensors that are stacked to a parameter."""
    return parameter.rpartition(".")[2].isdigit()


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more weights"
