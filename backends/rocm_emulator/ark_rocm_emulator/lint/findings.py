"""The lint's expectations of a kernel, and the findings that it reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expectations:
    """The properties that a kernel must have, according to the plan it was compiled for.

    ``threads`` and ``dynamic_lds`` (bytes) are those of one workgroup at launch.
    ``workgroups_per_cu`` must be resident at once (a loop kernel requires it). ``matrix``: True if
    MFMA or WMMA instructions must be present. ``marked``: the scopes in which all synchronisation
    between processors has markers. The markers of these scopes must be present. Scoped accesses
    without a marker are then not reported: they are packets, which carry their epoch.
    ``completed_barriers``: True if a wave's stores must have completed at a barrier after which
    another wave publishes them. On CDNA, clang omits the wait for these stores; LLVM added the wait
    for RDNA's CU mode (llvm-project pull request 160501). ``kernels`` limits the lint to these
    functions.
    """

    threads: int = 256
    dynamic_lds: int = 0
    workgroups_per_cu: int = 1
    matrix: bool = False
    allow_scratch: bool = False
    marked: tuple[str, ...] = ()
    completed_barriers: bool = False
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One fault that the lint has found: the rule, the line (counted from 1; 0 means the whole
    kernel) and the reason.
    """

    rule: str
    function: str
    line: int
    text: str
    message: str

    def __str__(self) -> str:
        place = f"{self.function}:{self.line}" if self.line else self.function
        code = f"\n    {self.text}" if self.text else ""
        return f"{place}: [{self.rule}] {self.message}{code}"
