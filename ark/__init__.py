"""ark compiles a whole model into one persistent kernel per GPU. This package has the names for
users.

Names are loaded at first use, so that `import ark` loads only its errors and its log.
`__init__.pyi` declares the names for type checkers and editors.
"""

from ark import _interrupt as _interrupt  # before all that takes time to load

# isort: split
import builtins
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ark import errors as error
from ark import log
from ark._version import __version__
from ark.errors import (
    BaseError,
    GpuError,
    InternalError,
    InvalidUsageError,
    ModelError,
    PlanError,
    SystemError,
    UnsupportedError,
)
from ark.ir.late import fillers as _fillers

_FROM = {
    "ark.runtime.api.context": ("PlannerContext",),
    "ark.runtime.api.core": ("Dims",),
    "ark.runtime.api.init": ("init", "set_rank", "set_world_size"),
    "ark.runtime.api.module": ("Module",),
    "ark.runtime.api.plan": ("Plan",),
    "ark.runtime.api.planner": ("Planner",),
    "ark.runtime.api.state": ("load", "save"),
    "ark.frontend.model": ("Model", "current_model", "set_model", "use_model"),
    "ark.frontend.tensor": ("NullTensor", "Parameter", "Tensor"),
    "ark.interop": ("from_onnx", "from_torch", "inference_model", "training_model"),
    "ark.ir.dtype": (
        "DataType",
        "bf16",
        "bool_",
        "byte",
        "fp4",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp16",
        "fp32",
        "int4",
        "int8",
        "int32",
        "int64",
        "uint4",
        "uint8",
        "uint32",
    ),
    "ark.models.sampling": ("SamplingParams",),
    "ark.models.structured": ("StructuredOutputsParams",),
    "ark.ops.gradients": ("grad", "optim"),
    "ark.parallel": ("parallelize",),
    "ark.profiler": ("Profiler",),
    "ark.runtime.launch": ("launch",),
    "ark.runtime.runtime": ("Runtime",),
    "ark.serving.llm": ("LLM",),
}
_MODULES = {name: (module, name) for module, names in _FROM.items() for name in names}
_ERRORS = (
    "BaseError",
    "GpuError",
    "InternalError",
    "InvalidUsageError",
    "ModelError",
    "PlanError",
    "UnsupportedError",
)
# Names for data types from ARK, the library whose Python interface ark also offers
# (docs/ark-interface.md). `tensor` needs an entry here because ark.tensor is both an op and a
# module path of ARK (_ALIASES): the attribute ark.tensor is the op.
_MODULES |= {
    "FP8_E4M3": ("ark.ir.dtype", "fp8_e4m3"),
    "FP8_E5M2": ("ark.ir.dtype", "fp8_e5m2"),
    "bool": ("ark.ir.dtype", "bool_"),
    "tensor": ("ark.ops", "tensor"),
}
# Module paths of ARK. Scripts written for ARK import from these paths; ark's own code does not.
_ALIASES = {
    "core": "ark.runtime.api.core",
    "data_type": "ark.ir.dtype",
    "error": "ark.errors",
    "executor": "ark.runtime.api.launched",
    "init": "ark.runtime.api.init",
    "model": "ark.frontend.model",
    "module": "ark.runtime.api.module",
    "planner": "ark.runtime.api.planner",
    "serialize": "ark.runtime.api.state",
    "tensor": "ark.frontend.tensor",
    "torch": "ark.interop.torch_names",
}
# Names of Microsoft's ARK that ark does not support yet. Using one raises an error that says so.
_NOT_BUILT = ("get", "put", "sampling", "signal", "wait")
# Names that `from ark import *` does not import: names that belong to a subpackage of ark, and
# names that would hide a name of Python.
_NOT_BY_STAR = {
    *_FROM["ark.interop"],
    "LLM",
    "SamplingParams",
    "StructuredOutputsParams",
    "bool",
    "bool_",
    "parallelize",
    "tensor",
}


class _UnsupportedNameError(UnsupportedError, AttributeError):
    """The error for a name of ARK that ark does not support yet. It is an AttributeError too, so
    `hasattr` returns False for the name.
    """


class _Alias(ModuleType):
    """A module under a path of ARK. It has the names of one of ark's modules, which is loaded when
    a name is used.
    """

    def __getattr__(self, name: str) -> Any:
        if name in ("__path__", "__file__", "__wrapped__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(_ALIASES[self._name()]), name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(importlib.import_module(_ALIASES[self._name()]), name, value)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(_ALIASES[self._name()]))

    def _name(self) -> str:
        return self.__name__.rpartition(".")[2]


def version() -> str:
    """The version of ark.

    Examples:
        >>> len(ark.version().split("."))
        3
    """
    return __version__


def _loads(*modules: str) -> Callable[[], object]:
    return lambda: [importlib.import_module(module) for module in modules]


_fillers.update(
    {
        "examiners": _loads("ark.runtime.known"),
        "methods of tensors": _loads("ark.ops", "ark.runtime.runtime"),
        "ops": _loads("ark.ops"),
        "task kinds": _loads("ark.tasks"),
    }
)


def _ops() -> list[str]:
    return importlib.import_module("ark.ops").__all__


def _names() -> list[str]:
    """The names of `from ark import *`. Names that are also Python's own are not among them:
    ark.bool, ark.SystemError and ops such as ark.abs must be written with `ark.`.
    """
    own = {*_MODULES, *_ERRORS, "__version__", "error", "log", "version"} - _NOT_BY_STAR
    return sorted(own) + [name for name in _ops() if not hasattr(builtins, name)]


def __getattr__(name: str) -> Any:
    """Loads a name, a module or an op at first use; raises UnsupportedError or AttributeError for
    other names.
    """
    if name == "__all__":
        value: Any = _names()
    elif name in _MODULES:
        module, attribute = _MODULES[name]
        value = getattr(importlib.import_module(module), attribute)
    elif name in _NOT_BUILT:
        raise _UnsupportedNameError(f"ark.{name} is not supported yet")
    elif name in _ALIASES:
        value = sys.modules[f"ark.{name}"]
    elif name.startswith("_"):
        raise AttributeError(f"module 'ark' has no attribute {name!r}")
    elif importlib.util.find_spec(f"ark.{name}") is not None:
        value = importlib.import_module(f"ark.{name}")
    elif name in _ops():
        value = getattr(importlib.import_module("ark.ops"), name)
    else:
        raise AttributeError(f"module 'ark' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_ALIASES, *_ops()})


sys.modules.update({f"ark.{name}": _Alias(f"ark.{name}") for name in _ALIASES})
