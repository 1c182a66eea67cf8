"""Reads how this machine's GPUs are linked, from NVML, for `ark.collective.topology.detect`.

NVML reports versions of NVLink, not rates. The nominal rates per link and direction are listed
here.
"""

from __future__ import annotations

import importlib
from collections import Counter
from fractions import Fraction
from typing import Any

from ark.collective.topology.detect import MachineLinks
from ark.errors import SystemError

# NVLink: GB/s each way per link, by NVML's version number (1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0, 6.0).
NVLINK_RATE = {1: 20, 2: 25, 3: 25, 4: 25, 5: 25, 6: 25, 7: 50, 8: 100}
# PCIe: GB/s each way per lane, by generation.
LANE_RATE = {1: Fraction(1, 4), 2: Fraction(1, 2), 3: 1, 4: 2, 5: 4, 6: 8}


def read_links() -> MachineLinks:
    """Returns the links of all GPUs. Raises SystemError with the reason if they cannot be read."""
    try:
        nvml = importlib.import_module("cuda.bindings.nvml")
        nvml.init_v2()
    except ImportError as error:
        raise SystemError(
            f"NVML cannot be queried ({error}): cuda-python is not installed, or older than 13.2, "
            "which brought it; run `pip install -U 'ark-gpu[cuda]'`."
        ) from error
    except Exception as error:  # without the driver the bindings raise their own error types
        raise SystemError(
            f"NVML cannot be initialised ({type(error).__name__}); check the driver with "
            "`nvidia-smi`."
        ) from error
    try:
        devices = [
            nvml.device_get_handle_by_index_v2(index) for index in range(nvml.device_get_count_v2())
        ]
        if not devices:
            raise SystemError("NVML finds no GPU.")
        return _read(nvml, devices)
    except nvml.NvmlError as error:
        raise SystemError(f"NVML does not report the links between the GPUs: {error}.") from error
    finally:
        nvml.shutdown()


def _read(nvml: Any, devices: list[Any]) -> MachineLinks:
    number = {_bus_id(nvml.device_get_pci_info_v3(each)): i for i, each in enumerate(devices)}
    direct: Counter[tuple[int, int]] = Counter()
    switched: Counter[int] = Counter()
    host = []
    for index, device in enumerate(devices):
        for link in range(nvml.NVLINK_MAX_LINKS):
            try:
                if not nvml.device_get_nvlink_state(device, link):
                    continue
            except (nvml.NotSupportedError, nvml.InvalidArgumentError):
                break  # no more links on this device
            rate = NVLINK_RATE.get(int(nvml.device_get_nvlink_version(device, link)), 25)
            kind = int(nvml.device_get_nvlink_remote_device_type(device, link))
            if kind == int(nvml.IntNvLinkDeviceType.NVLINK_DEVICE_TYPE_SWITCH):
                switched[index] += rate
            elif kind == int(nvml.IntNvLinkDeviceType.NVLINK_DEVICE_TYPE_GPU):
                remote = _bus_id(nvml.device_get_nvlink_remote_pci_info_v2(device, link))
                if number.get(remote, -1) > index:
                    direct[index, number[remote]] += rate
        generation = nvml.device_get_gpu_max_pcie_link_generation(device)
        width = nvml.device_get_max_pcie_link_width(device)
        host.append((index, Fraction(LANE_RATE.get(generation, 4) * width)))
    return MachineLinks(
        nvml.device_get_name(devices[0]),
        len(devices),
        tuple((a, b, Fraction(rate)) for (a, b), rate in sorted(direct.items())),
        tuple((index, Fraction(rate)) for index, rate in sorted(switched.items())),
        tuple(host),
    )


def _bus_id(info: Any) -> tuple[int, int, int]:
    return int(info.domain), int(info.bus), int(info.device_)
