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
        "matrix units sum products of tf32 fast enough for three of them to be one of fp32",
    )
    ATTENTION_UNITS = (
        "attention_units",
        "attention of many rows of a 16-bit type runs on matrix units in any variant",
    )
    ATTENTION_PARTS = (
        "attention_parts",
        "attention of fp32 queries over keys and values of bf16 runs on matrix units too",
    )
    K_PARTS = (
        "k_parts",
        "matrix units take products of 16-bit types in the variant `block` too, with what follows "
        "them, and in parts of k where tiles are few (ark.lower.k_parts)",
    )
    CODE_BOXES = (
        "code_boxes",
        "box copies bring codes of quantised weights, which products of 9 to 64 rows multiply in "
        "the variant `matrix` (ark.lower.codes)",
    )
    WINDOW_BOXES = ("window_boxes", "box copies may be of the windows of an image")
    NAMED_BARRIERS = ("named_barriers", "some warps of a block can meet apart from the others")
    PACKETS = ("packets", "small activations may travel as {value, epoch}")
    SHORT_PACKETS = (
        "short_packets",
        "what a linear layer of one row would round to 16 bits travels as such packets",
    )
    PACKET_GATE = (
        "packet_gate",
        "a task waits for one packet of its input before it loads the others, so that norms, "
        "top-k, experts and the choice of a token read packets too",
    )
    ASKS_AHEAD = (
        "asks_ahead",
        "where rows of weights are whole loads of all warps, blocks that wait ask for those of "
        "their next tasks (ark.tasks.linear_form.dealt)",
    )
    ROWS_ON_UNITS = (
        "rows_on_units",
        "linear layers of few rows, with weights of bf16 or quantised, run on matrix units, which "
        "read the input from memory, so that several rows take the time of one "
        "(ark.tasks.linear_form.on_units)",
    )
    CLAIMS = (
        "claims",
        "processors claim the tiles of large ops that only move bytes, because memory serves some "
        "processors faster",
    )
    ROUNDS_AHEAD = (
        "rounds_ahead",
        "in the variant `block` a thread has registers for two rounds of an elementwise tile, so "
        "that one is loaded while the other is computed",
    )
    PEER_PACKETS = ("peer_packets", "packets travel to peers")
    PEER_STORES = (
        "peer_stores",
        "links to peers carry stores but no read-modify-write: ranks signal by stores",
    )
    PEER_BULK = (
        "peer_bulk",
        "a processor copies whole pieces through shared memory, without registers",
    )
    PEER_MULTICAST = (
        "peer_multicast",
        "a switch adds and stores for all ranks at once; no machine model has it, because no "
        "backend maps such memory yet",
    )
    ROW_COPIES = (
        "row_copies",
        "a thread starts copies of whole rows into shared memory, which end by themselves, so that "
        "rows come while others are computed",
    )
    PROXY = ("proxy", "the host can copy for the device")
    UNCACHED_COPIES = (
        "uncached_copies",
        "copy engines write past caches that may hold lines of memory other than symmetric",
    )
    SINGLE_THREAD = (
        "single_thread",
        "a processor runs a task in one thread, so bodies are loops that the compiler vectorises",
    )
    ONE_PRODUCT_BODY = (
        "one_product_body",
        "products and attention of every type and shape have one body at one rate, which "
        "does what follows them too",
    )
    STARTS_PROCESSORS = (
        "starts_processors",
        "each launch starts its processors, which spin while they wait: little work gets few",
    )
    HOST_MEMORY = ("host_memory", "its memory is the host's")
