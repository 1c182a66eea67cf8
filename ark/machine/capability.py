"""Capabilities: named features of hardware and drivers. Code selects an implementation by
capabilities, and thus does not depend on a vendor.

A machine model lists the capabilities that the machine has. Plans contain them by name. Called by
ark.machine, by lowering, planning and code generation, and by the machine models of the backends.
"""

from __future__ import annotations

from enum import Enum

from ark.errors import PlanError


class Capability(Enum):
    """A capability: its name in plans and its meaning."""

    meaning: str

    def __new__(cls, word: str, meaning: str = "") -> Capability:
        member = object.__new__(cls)
        member._value_ = word
        member.meaning = meaning
        return member

    @classmethod
    def named(cls, word: object) -> Capability:
        """The capability of that name; raises PlanError, with the known names, if there is none."""
        for member in cls:
            if member.value == word:
                return member
        known = ", ".join(sorted(c.value for c in cls))
        raise PlanError(f"the capability {word!r} does not exist; choose one of {known}")

    MMA_SYNC = ("mma_sync", "a warp multiplies tiles of 16-bit types on matrix units")
    WGMMA = ("wgmma", "four warps together multiply tiles in shared memory, asynchronously")
    TCGEN05 = ("tcgen05", "one thread starts products whose sums lie in tensor memory")
    MFMA = ("mfma", "a wavefront of 64 lanes multiplies tiles on matrix units")
    WMMA = ("wmma", "a wavefront of 32 lanes multiplies tiles on matrix units")
    FP32_PARTS = (
        "fp32_parts",
        "three products in tf32 on matrix units, which give one in fp32, take less time than a "
        "product in fp32 without them",
    )
    ATTENTION_UNITS = (
        "attention_units",
        "attention of many rows of a 16-bit type runs on matrix units in any variant",
    )
    ATTENTION_PARTS = (
        "attention_parts",
        "attention of fp32 queries over keys and values in bf16 runs on matrix units",
    )
    K_PARTS = (
        "k_parts",
        "products of 16-bit types run on matrix units in the variant `block` too, with their "
        "epilogues; if there are few tiles, k is cut into parts (ark.lower.k_parts)",
    )
    CODE_BOXES = (
        "code_boxes",
        "box copies load codes of quantised weights for products of 9 to 64 rows in the variant "
        "`matrix` (ark.lower.codes)",
    )
    WINDOW_BOXES = ("window_boxes", "box copies can load the windows of an image")
    NAMED_BARRIERS = ("named_barriers", "some warps of a block can synchronise without the others")
    PACKETS = ("packets", "small activations may be stored as pairs {value, epoch}")
    SHORT_PACKETS = (
        "short_packets",
        "packets may have 4 bytes: 16 bits of data and 16 bits of the epoch",
    )
    PACKET_GATE = (
        "packet_gate",
        "a task waits for one packet of its input before it loads the others, so that norms, "
        "top-k, experts and the choice of a token read packets too",
    )
    ASKS_AHEAD = (
        "asks_ahead",
        "a block that waits loads the first weight rows of its next task, if all warps together "
        "load a row in whole accesses (ark.tasks.linear_form.dealt)",
    )
    ROWS_ON_UNITS = (
        "rows_on_units",
        "linear layers of few rows with bf16 or quantised weights run on matrix units and read "
        "the input from memory, so that several rows take about the time of one row "
        "(ark.tasks.linear_form.on_units)",
    )
    CLAIMS = (
        "claims",
        "processors claim the tiles of large copies at run time, because some processors load "
        "from memory faster than others",
    )
    ROUNDS_AHEAD = (
        "rounds_ahead",
        "in the variant `block` a thread has registers for two rounds of an elementwise tile, so "
        "one is loaded while the other is computed",
    )
    PEER_PACKETS = ("peer_packets", "packets can be stored to peers")
    PEER_STORES = (
        "peer_stores",
        "links to peers support stores but no atomics, so ranks signal by stores",
    )
    PEER_BULK = (
        "peer_bulk",
        "a processor copies data to peers through shared memory, without registers",
    )
    PEER_MULTICAST = (
        "peer_multicast",
        "a switch sums and stores for all ranks at once; no machine model has it, because no "
        "backend maps such memory yet",
    )
    ROW_COPIES = (
        "row_copies",
        "a thread starts asynchronous copies of whole rows to shared memory, so rows are loaded "
        "while others are computed",
    )
    PROXY = ("proxy", "the host can copy for the device")
    UNCACHED_COPIES = (
        "uncached_copies",
        "copy engines bypass caches that may hold lines of memory that is not symmetric",
    )
    SINGLE_THREAD = (
        "single_thread",
        "a processor runs a task in one thread, so bodies are loops that the compiler vectorises",
    )
    ONE_PRODUCT_BODY = (
        "one_product_body",
        "products and attention of every type and shape have one body, with one rate and all "
        "epilogues",
    )
    STARTS_PROCESSORS = (
        "starts_processors",
        "each launch starts its processors, which spin while they wait; plans with little work use "
        "few of them",
    )
    HOST_MEMORY = ("host_memory", "the device's memory is the host's")
