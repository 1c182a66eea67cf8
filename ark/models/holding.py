"""Decides which weights of a checkpoint stay quantised in memory, and which are dequantised when
they are loaded. Called by ark.models.checkpoint.
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


def held(shapes: Shapes, quantized: Mapping[str, QuantizedTensor], where: str) -> dict[str, Layout]:
    """The layouts of the parameters that stay quantised in memory. shapes: the shapes of all
    weights, by ark's names. quantized: the quantised weights. A weight with whose codes ark cannot
    compute is dequantised while it is loaded, and a warning names it.
    """
    own = {
        name: None if name == "embedding" or len(shapes[name]) != len(t.shape) else t.layout()
        for name, t in quantized.items()
    }
    layouts, floats = _stacked(shapes, own)
    if floats:
        kinds = sorted({quantized[name].format.name for name in floats})
        log.warn(
            f"{where}: loading dequantises {_listed(floats)}, {len(floats)} of {len(quantized)} "
            f"quantised weights ({', '.join(kinds)}), because ark cannot multiply by their "
            "codes; they take as much memory as weights that are not quantised"
        )
    return layouts


def layouts_on_load(
    config: LlamaConfig,
    shapes: Shapes,
    quantized: Mapping[str, QuantizedTensor],
    name: str,
    where: str,
) -> tuple[OnLoad, dict[str, Layout]]:
    """The format with the given name, and the layouts of the parameters that are quantised to it
    when they are loaded. These are the weights of linear layers, except the head and the routers of
    experts.
    """
    chosen = on_load(name)
    if quantized:
        kind = next(iter(quantized.values())).format.name
        raise InvalidUsageError(
            f"the weights of {where} are already quantised ({kind}); omit quantize={name!r}, or "
            "use the checkpoint that is not quantised"
        )
    own = {}
    unquantized = decoder(config.architecture).UNQUANTIZED
    for parameter, shape in shapes.items():
        pattern = ".".join("{}" if part.isdigit() else part for part in parameter.split("."))
        if len(shape) > 1 and pattern not in unquantized and not pattern.endswith("_bias"):
            own[parameter] = chosen.layout(shape)
    layouts, floats = _stacked(shapes, own)
    if floats:
        log.warn(
            f"{_listed(floats)} of {where} remain as they are stored, because ark cannot "
            f"multiply by them in {name} (their rows are not a multiple of 8 elements)"
        )
    return chosen, layouts


def quantised_config(config: LlamaConfig, name: str | None, where: str) -> LlamaConfig:
    """The config of a model without a checkpoint, with its weights quantised to the format of that
    name. If the name is None, the config is returned unchanged.
    """
    if name is None:
        return config
    _, layouts = layouts_on_load(config, parameters(config), {}, name, where)
    return replace(config, layouts=tuple(layouts.items()))


def stacked_name(weight: str) -> str:
    """The name of the parameter to which a weight belongs. The name of an expert's weight ends in a
    number; the parameter contains the weights of all experts.
    """
    stem, _, number = weight.rpartition(".")
    return stem if number.isdigit() else weight


def _stacked(
    shapes: Shapes, own: Mapping[str, Layout | None]
) -> tuple[dict[str, Layout], list[str]]:
    """Combines the weights of experts into parameters. Returns the layouts of the parameters, and
    the names of quantised weights that must be dequantised. A parameter with the weights of several
    experts stays quantised only if all of these have the same layout and their inputs are not
    reordered.
    """
    experts: dict[str, list[str]] = {}
    for name in shapes:
        experts.setdefault(stacked_name(name), []).append(name)
    layouts, floats = {}, []
    for parameter, names in experts.items():
        several = names != [parameter] or len(shapes[parameter]) == 3
        kinds = {own.get(name) for name in names}
        layout = kinds.pop() if len(kinds) == 1 else None
        if layout is None or (several and layout.ordered):
            floats += [name for name in names if name in own]
        else:
            layouts[parameter] = layout
    return layouts, floats


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more weights"
