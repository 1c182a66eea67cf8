"""L2 eviction policies of packets and of streamed data: compiled for every architecture, and the
policy words compared with those that the compiler emits for `createpolicy`.
"""

from __future__ import annotations

import re
import struct
from importlib import resources

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

from ark.backend.codegen.constants import constants
from ark.backend.codegen.dialect import Source
from ark.backend.protocol import Target
from tests import kept

MODELS = sorted(machines.MODELS)
STORES = {
    "packet": "ark_packet_store(p, v, far);",
    "short": "ark_short_store(reinterpret_cast<ark_u32*>(p), 1u, far);",
    "pair": "ark_packets_store(p, v, v, far);",
}
LOADS = {
    "packet": "out[0] = ark_packet_load(p, far);",
    "short": "out[0] = ark_short_load(reinterpret_cast<ark_u32*>(p), far);",
    "pair": "ark_packets_load(p, out[0], out[1], far);",
}


def compiled(arch: str, text: str) -> bytes:
    """The kernel's instructions, without the constants that the file also contains."""
    data = kept.binary(backend, Source(text), Target(arch, 32)).data
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<3H", data, 58)
    sections = [struct.unpack_from("<2I4Q", data, table + i * size) for i in range(count)]
    for name, _, _, _, at, length in sections:
        if data.startswith(b".text.ark_loop\0", sections[names][4] + name):
            return data[at : at + length]
    raise AssertionError("the file has no section with a kernel's instructions")


def accesses(name: str, statement: str, far: bool) -> bytes:
    machine = backend.machine(name)
    dialect = backend.dialect(machine.arch)
    kernel = (
        'extern "C" __global__ void ark_loop(ark_u64* p, ark_u64* out, ark_u64 v) {\n'
        f"constexpr bool far = {str(far).lower()};\n{statement}\n}}\n"
    )
    return compiled(machine.arch, "\n".join((constants(machine, 1, 1024), dialect.prelude, kernel)))


def policy(file: str, name: str) -> list[int]:
    """Returns the upper words of the eviction policies with these names in a header; the lower
    words are zero.
    """
    text = resources.files("ark_cuda").joinpath(file).read_text()
    (expression,) = re.findall(rf"constexpr ark_u64 {name} =([^;]*);", text)
    matches = [int(word, 16) for word in re.findall(r"0x[0-9a-f]{16}", expression)]
    assert matches and not any(word & 0xFFFFFFFF for word in matches)
    return [word >> 32 for word in matches]


def word(value: int) -> bytes:
    return value.to_bytes(4, "little")


@pytest.mark.parametrize("name", MODELS)
def test_packets_are_accessed_with_the_evict_last_policy(name: str) -> None:
    (last,) = policy("order.h", "ARK_PACKET_POLICY")
    for statement in (*STORES.values(), *LOADS.values(), "*(uint4*)out = ark_shorts_load(p);"):
        assert word(last) in accesses(name, statement, False), statement


def test_packets_of_other_gpus_have_no_l2_policy() -> None:
    (last,) = policy("order.h", "ARK_PACKET_POLICY")
    for statement in (*STORES.values(), *LOADS.values()):
        assert word(last) not in accesses("h100", statement, True), statement


def test_policy_words_equal_those_of_createpolicy() -> None:
    # For sm_80 the compiler computes the policy words itself; for later architectures it emits an
    # instruction that computes them at run time.
    def binary_of(kind: str) -> bytes:
        return compiled(
            "sm_80",
            'extern "C" __global__ void ark_loop(unsigned long long* to) {\n'
            "unsigned long long v;\n"
            f'asm volatile("createpolicy.fractional.L2::{kind}.b64 %0, 1.0;" : "=l"(v));\n'
            "*to = v;\n}\n",
        )

    (last,) = policy("order.h", "ARK_PACKET_POLICY")
    first, ordinary = policy("ring.h", "ARK_STREAM_POLICY")
    assert word(last) in binary_of("evict_last") and word(last) not in binary_of("evict_first")
    assert word(first) in binary_of("evict_first") and word(first) not in binary_of("evict_last")
    assert ordinary == 0x10000000  # the policy of a copy for which none is given
    for name, least in (("stream.h", 1), ("stream_growth.h", 4)):
        text = resources.files("ark_cuda").joinpath(name).read_text()
        copies = re.findall(r"ark_bulk_copy\((?:[^()]|\([^()]*\))*\)", text)
        assert len(copies) >= least
        assert all(copy.endswith(", ARK_STREAM_POLICY)") for copy in copies)
