"""Reads how this machine's GPUs are linked, from HIP, for `ark.collective.topology.detect`.

HIP reports the kind of link and the number of hops between two GPUs, but not the rate. Each link
gets the nominal rate of one Infinity Fabric link of the architecture. HIP does not report the
number of links between two dies of a package either, so a pair of dies counts as one link.
"""

from __future__ import annotations

import importlib
import itertools
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ark.errors import SystemError
from ark_rocm.driver import device_properties

if TYPE_CHECKING:
    from ark.collective.topology.detect import MachineLinks

XGMI_LINK_TYPE = 4  # HSA_AMD_LINK_INFO_TYPE_XGMI
# Nominal rate of one Infinity Fabric link between two GPUs, in GB/s each way.
LINK_RATE = {"gfx90a": Fraction(50), "gfx942": Fraction(64), "gfx950": Fraction(384, 5)}
HOST_RATE = Fraction(32)


def read_links() -> MachineLinks:
    """Returns the links of all GPUs. Raises SystemError with the reason if they cannot be read."""
    from ark.collective.topology.detect import MachineLinks  # `modifying` works without it

    try:
        package = importlib.import_module("hip")
        # HIP's modules are submodules of `hip` up to hip-python 7.x, and attributes of a
        # compatibility package in 10.x.
        hip = getattr(package, "hip", None) or importlib.import_module("hip.hip")
        code, count = hip.hipGetDeviceCount()
    except ImportError as error:
        raise SystemError(
            "HIP cannot be queried: hip-python is not installed; run `pip install 'ark-gpu[rocm]'`."
        ) from error
    except RuntimeError as error:
        raise SystemError(
            "HIP cannot be loaded: ROCm's library libamdhip64 was not found; install ROCm."
        ) from error
    if int(code) or not count:
        raise SystemError(f"HIP finds no GPU ({getattr(code, 'name', code)}).")
    properties = device_properties(hip, 0)
    architecture = _text(properties.gcnArchName).partition(":")[0]
    rate = LINK_RATE.get(architecture, Fraction(50))
    direct = []
    for a, b in itertools.combinations(range(count), 2):
        kind, hops = _call("hipExtGetLinkTypeAndHopCount", hip.hipExtGetLinkTypeAndHopCount(a, b))
        if int(kind) == XGMI_LINK_TYPE and int(hops) == 1:
            direct.append((a, b, rate))
    host = tuple((index, HOST_RATE) for index in range(count))
    return MachineLinks(_text(properties.name), count, tuple(direct), (), host)


def modifying(hip: Any, index: int, arch: str, count: int) -> bool:
    """True if the device's links to all `count` visible devices support atomic read-modify-write
    operations. Links over PCIe may not. For a single device, or if HIP does not report it, the
    result is True for architectures with Infinity Fabric.
    """
    fabric = arch in LINK_RATE
    ask = getattr(hip, "hipDeviceGetP2PAttribute", None)
    if ask is None or count == 1:
        return fabric
    native = hip.hipDeviceP2PAttr.hipDevP2PAttrNativeAtomicSupported
    answers = [ask(native, index, peer) for peer in range(count) if peer != index]
    return all(bool(value) if int(code) == 0 else fabric for code, value in answers)


def _call(name: str, result: tuple[Any, ...]) -> tuple[Any, ...]:
    code, *values = result
    if int(code):
        raise SystemError(f"{name} failed ({getattr(code, 'name', code)}).")
    return tuple(values)


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
