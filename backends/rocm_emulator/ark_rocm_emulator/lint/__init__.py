"""The ISA lint: checks AMD machine code for faults that running it on the emulator cannot show.

The tests of the ROCm backend call ``lint`` on the assembly of every kernel that ark emits. The lint
checks cache control around scoped synchronisation; budgets of scratch, LDS and registers; and that
matrix instructions are present where the plan requires them.
"""

from __future__ import annotations

from collections.abc import Mapping

from .calls import with_calls
from .coherence import check_coherence
from .findings import Expectations, Finding
from .listing import Resources, as_assembly, parse
from .resources import check_resources
from .targets import TARGETS, CacheRules, TargetLimits

__all__ = [
    "TARGETS",
    "CacheRules",
    "Expectations",
    "Finding",
    "Resources",
    "TargetLimits",
    "as_assembly",
    "lint",
]


def lint(
    assembly: str,
    target: TargetLimits,
    expectations: Expectations | None = None,
    resources: Mapping[str, Resources] | None = None,
) -> list[Finding]:
    """Checks AMD GPU assembly and returns the findings in text order. The result is empty if there
    are no faults.

    Args: assembly: text of optimised ``clang -S``, or a disassembly through ``as_assembly``.
    target: limits and cache rules, ``TARGETS[arch]``. expectations: the properties that the kernels
    must have, such as the size of a workgroup. resources: each kernel's resources by its name, for
    a listing without a metadata note.
    """
    expected = expectations or Expectations()
    listing = parse(assembly)
    figures = {**listing.resources, **(resources or {})}
    findings: list[Finding] = []
    for function in listing.functions:
        if expected.kernels and function.name not in expected.kernels:
            continue
        whole = with_calls(function, listing.functions)
        used = figures.get(function.name)
        called = used is None  # not a kernel
        findings.extend(check_coherence(whole, target.cache, expected, called))
        findings.extend(check_resources(function, used, target, expected))
    return findings
