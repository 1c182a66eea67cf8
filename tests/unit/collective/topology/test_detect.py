"""Detection of a machine's links, with stand-ins for the vendors' libraries."""

import sys
from fractions import Fraction
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace

import pytest

from ark.collective.topology import load
from ark.collective.topology.detect import MachineLinks, detect
from ark.errors import SystemError


def absent():
    raise SystemError("No device here.")


def test_detection_takes_the_first_reader_that_sees_devices():
    machine = MachineLinks("box", 2, direct=((0, 1, Fraction(100)),))
    topology = detect([absent, lambda: machine])
    assert topology.ranks == ("g0", "g1")
    assert topology.capacities() == {("g0", "g1"): 100, ("g1", "g0"): 100}


def test_host_connects_otherwise_separate_devices():
    host = tuple((device, Fraction(32)) for device in range(4))
    pairs = ((0, 1, Fraction(100)), (2, 3, Fraction(100)))
    apart = detect([lambda: MachineLinks("pairs", 4, pairs, (), host)])
    assert apart.switches == ("host",)
    assert apart.capacities()["host", "g3"] == 32
    joined = detect([lambda: MachineLinks("ring", 4, (*pairs, (1, 2, Fraction(50))), (), host)])
    assert joined.switches == ()


def test_detection_without_devices_gives_every_reason():
    with pytest.raises(SystemError, match=r"cannot be detected\. No device here\."):
        detect([absent])
    with pytest.raises(SystemError, match="No installed backend"):
        detect([])


def test_backend_that_cannot_be_loaded_is_a_reason(monkeypatch):
    points = [EntryPoint("broken", "no_such_backend", "ark.backends")]
    monkeypatch.setattr("ark.collective.topology.detect.entry_points", lambda group: points)
    with pytest.raises(SystemError, match="backend broken cannot be loaded"):
        detect()
    points[:] = [EntryPoint("linkless", "json", "ark.backends")]
    with pytest.raises(SystemError, match="No installed backend"):
        detect()


def test_detection_here_gives_a_topology_or_the_reason():
    try:
        load("detect").validate()
    except SystemError as error:
        assert "cannot be detected" in str(error)


class NvmlError(Exception):
    pass


class NotSupportedError(NvmlError):
    pass


def nvml(links):
    """Returns a stand-in for NVML. links[device] lists (version, "switch" or the other device)."""
    module = ModuleType("cuda.bindings.nvml")
    bus = lambda index: SimpleNamespace(domain=0, bus=16 + index, device_=0)  # noqa: E731

    def state(device, link):
        if not links[device]:
            raise NotSupportedError
        return link < len(links[device])

    def kind(device, link):
        return 2 if links[device][link][1] == "switch" else 0

    for name, value in {
        "NVLINK_MAX_LINKS": 18,
        "NvmlError": NvmlError,
        "NotSupportedError": NotSupportedError,
        "InvalidArgumentError": type("InvalidArgumentError", (NvmlError,), {}),
        "IntNvLinkDeviceType": SimpleNamespace(
            NVLINK_DEVICE_TYPE_GPU=0, NVLINK_DEVICE_TYPE_SWITCH=2
        ),
        "init_v2": lambda: None,
        "shutdown": lambda: None,
        "device_get_count_v2": lambda: len(links),
        "device_get_handle_by_index_v2": lambda index: index,
        "device_get_name": lambda device: "a GPU",
        "device_get_pci_info_v3": bus,
        "device_get_nvlink_state": state,
        "device_get_nvlink_version": lambda device, link: links[device][link][0],
        "device_get_nvlink_remote_device_type": kind,
        "device_get_nvlink_remote_pci_info_v2": lambda device, link: bus(links[device][link][1]),
        "device_get_gpu_max_pcie_link_generation": lambda device: 5,
        "device_get_max_pcie_link_width": lambda device: 16,
    }.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    "links, node, bandwidth",
    [
        ([[(6, "switch")] * 18] * 8, "s0", 450),
        ([[(4, "switch")] * 12] * 4, "s0", 300),
        ([[(2, 1), (2, 1)], [(2, 0), (2, 0)]], "g1", 50),
        ([[], []], "host", 64),
    ],
)
def test_nvlinks_through_nvml(monkeypatch, links, node, bandwidth):
    from ark_cuda.links import read_links

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", nvml(links))
    topology = detect([read_links])
    assert len(topology.ranks) == len(links)
    assert topology.capacities()["g0", node] == bandwidth


def test_nvml_without_devices(monkeypatch):
    from ark_cuda.links import read_links

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", nvml([]))
    with pytest.raises(SystemError, match="finds no GPU"):
        read_links()


def hip(count, hops, arch="gfx942:sramecc+"):
    """Returns a stand-in for hip.hip with `count` devices. hops(a, b) is (kind, hops)."""
    package, module = ModuleType("hip"), ModuleType("hip.hip")
    package.hip = module
    module.hipGetDeviceCount = lambda: (0, count)
    module.hipDeviceProp_t = lambda: SimpleNamespace(name=b"a GPU", gcnArchName=arch.encode())
    module.hipGetDeviceProperties = lambda properties, index: (0,)
    module.hipExtGetLinkTypeAndHopCount = lambda a, b: (0, *hops(a, b))
    return package


def test_mesh_through_hip(monkeypatch):
    from ark_rocm.links import read_links

    monkeypatch.setitem(sys.modules, "hip", hip(8, lambda a, b: (4, 1)))
    topology = detect([read_links])
    assert len(topology.links) == 56
    assert set(topology.capacities().values()) == {Fraction(64)}


def test_gpus_on_the_bus_through_hip(monkeypatch):
    from ark_rocm.links import read_links

    monkeypatch.setitem(sys.modules, "hip", hip(2, lambda a, b: (2, 2)))
    assert detect([read_links]).switches == ("host",)


def test_hip_without_devices(monkeypatch):
    from ark_rocm.links import read_links

    monkeypatch.setitem(sys.modules, "hip", hip(0, None))
    with pytest.raises(SystemError, match="finds no GPU"):
        read_links()
