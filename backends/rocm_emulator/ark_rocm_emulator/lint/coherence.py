"""Checks the cache control and the waits around every scoped synchronisation.

The emulator is sequentially consistent, so a missing fence does not change the results of an
emulated kernel; only the instructions show it. This module does a forward data-flow analysis over
the blocks of a function. Its facts are steps that are still missing on a path: a wait for a store,
a write-back of a cache, an invalidation after a flag was read. At each synchronisation point it
reports the missing steps that are required there. The required sequences are those of the memory
model tables in LLVM's "User Guide for AMDGPU Backend", section "Memory Model".

The synchronisation points are found in two ways. Markers are assembly comments that state the
intent exactly: ``; ark.release <scope>`` before a publication and ``; ark.released <scope>`` after
it; ``; ark.acquire <scope>`` after a wait; ``; ark.read <scope>`` after the load of a flag, if a
later fence makes that load an acquire; and ``; ark.arrived workgroup`` where the stores of all
waves must have arrived. Without markers (and unless ``Expectations.marked`` promises some), scope
bits of instructions are used: a store or atomic with such bits publishes all earlier writes, and a
load that is polled in a spin loop acquires later reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from .findings import Expectations, Finding
from .listing import Function, Instruction, waited
from .loops import innermost_loops
from .targets import SCOPES, CacheRules

_SCOPE_BITS = frozenset({"glc", "dlc", "sc0", "sc1"})
_Facts = frozenset[str]


def _access(inst: Instruction) -> str:
    """The kind of an access: ``load``, ``store`` or ``atomic`` for global and flat memory,
    ``lds-store``, or an empty string.
    """
    name = inst.mnemonic
    if name.startswith(("ds_write", "ds_store", "ds_add", "ds_sub", "ds_max", "ds_min")):
        return "lds-store"
    if not name.startswith(("global_", "flat_", "buffer_")):
        return ""
    if "lds" in inst.operands or "_lds_" in name:
        return ""
    for kind in ("load", "store", "atomic"):
        if name.split("_")[1] == kind:
            return kind
    return ""


def _returns(inst: Instruction) -> bool:
    return bool(inst.bits & {"glc", "sc0"})


def _scope(inst: Instruction, rules: CacheRules) -> str:
    tables = {
        "load": rules.load_scope,
        "store": rules.store_scope,
        "atomic": rules.atomic_scope,
    }
    table = tables.get(_access(inst), {})
    return table.get(inst.bits & _SCOPE_BITS, "workgroup")


def _reaches(scope: str, wanted: str) -> bool:
    return SCOPES.index(scope) >= SCOPES.index(wanted)


class Coherence:
    """Runs the rules on one function; ``findings`` yields the faults, in text order."""

    def __init__(
        self, function: Function, rules: CacheRules, expected: Expectations, stored: bool
    ) -> None:
        self._function = function
        self._stored = stored
        self._rules = rules
        self._expected = expected
        self._pieces = frozenset().union(*rules.release.values())
        self._caches = frozenset().union(*rules.acquire.values())
        self._spins = self._spinning_loads()
        self._reads = any(
            i.is_marker and i.mnemonic == "read" for b in function.blocks for i in b.instructions
        )

    def _spinning_loads(self) -> frozenset[int]:
        """The lines of scoped loads in loops that do not otherwise access global memory or LDS."""
        spinning: set[int] = set()
        for loop in innermost_loops(self._function.blocks):
            insts = [i for b in loop for i in self._function.blocks[b].instructions]
            loads = [i for i in insts if _access(i) == "load"]
            scoped = [i for i in loads if _scope(i, self._rules) != "workgroup"]
            busy = any(
                _access(i) in ("store", "lds-store") or i.mnemonic == "s_barrier" for i in insts
            )
            if scoped and len(scoped) == len(loads) and not busy:
                spinning.update(i.line for i in scoped)
        return frozenset(spinning)

    def findings(self) -> Iterator[Finding]:
        blocks = self._function.blocks
        entry: list[_Facts | None] = [None] * len(blocks)
        entry[0] = frozenset(
            f"{word}:{scope}" for word in ("unread", "bare") for scope in SCOPES[1:]
        ) | ({"stored"} if self._stored else set())
        todo = [0]
        while todo:
            index = todo.pop()
            facts = entry[index]
            assert facts is not None
            for inst in blocks[index].instructions:
                facts = self._step(inst, facts)
            for follow in blocks[index].follows:
                old = entry[follow]
                new = facts if old is None else old | facts
                if new != old:
                    entry[follow] = new
                    todo.append(follow)
        for block, facts in zip(blocks, entry, strict=True):
            if facts is None:
                continue
            for inst in block.instructions:
                yield from self._judge(inst, facts)
                facts = self._step(inst, facts)

    def _step(self, inst: Instruction, facts: _Facts) -> _Facts:
        """Returns the facts that hold after ``inst`` if `facts` hold before it."""
        rules = self._rules
        if inst.is_marker:
            scope = inst.operands[0]
            if inst.mnemonic == "arrived" or (inst.mnemonic == "acquire" and self._reads):
                return facts
            if inst.mnemonic == "release":
                covered = {f"bare:{s}" for s in SCOPES[1:] if _reaches(scope, s)}
                return (facts | {f"release:{scope}"}) - covered
            if inst.mnemonic == "released":
                kept = frozenset(f for f in facts if not f.startswith("release:"))
                return kept | {f"bare:{wide}" for wide in SCOPES[1:]}
            return facts | {f"unread:{wide}" for wide in SCOPES[1:]}
        counters = waited(inst)
        if counters:
            settled: set[str] = set()
            if counters.get("vmcnt") == 0:
                settled |= {"load-out", "write-back-out"}
            if counters.get(rules.stores_wait_on) == 0:
                settled |= {"store-out", "write-back-out"}
            if counters.get("lgkmcnt") == 0:
                settled.add("lds-out")
            return facts - settled
        if inst.mnemonic == "s_barrier":
            return facts | {"others-out"} if "store-out" in facts else facts - {"others-out"}
        key = (inst.mnemonic, inst.bits & _SCOPE_BITS)
        if key in rules.invalidates:
            if "load-out" in facts:
                return facts
            caches = rules.invalidates[key]
            return facts - {f"stale:{c}" for c in caches} - {f"spun:{c}" for c in caches}
        if key in rules.writes_back:
            # A write-back may miss a store that is still in flight when it begins. This is not
            # reported: every publication requires a wait for both the store and the write-back
            # anyway. A workgroup that has stored nothing has nothing to write back.
            pieces = rules.writes_back[key]
            out = {"write-back-out"} if "stored" in facts else set()
            return facts - {f"dirty:{p}" for p in pieces} | out
        return self._access_step(inst, facts)

    def _access_step(self, inst: Instruction, facts: _Facts) -> _Facts:
        kind = _access(inst)
        scope = _scope(inst, self._rules)
        if kind == "lds-store":
            return facts | {"lds-out"}
        # An atomic operation that returns no value cannot observe a flag.
        reads = kind == "load" or (kind == "atomic" and _returns(inst))
        if reads and scope != "workgroup":
            facts = facts | {f"stale:{cache}" for cache in self._caches}
            facts = facts - {f"unread:{s}" for s in SCOPES[1:] if _reaches(scope, s)}
            if inst.line in self._spins:
                least = scope if self._rules.exact_bits else "agent"
                facts = facts | {f"spun:{cache}" for cache in self._rules.acquire[least]}
        if reads:
            facts = facts | {"load-out"}
        if kind in ("store", "atomic"):
            facts = frozenset(f for f in facts if not f.startswith("release:"))
            facts = facts - {"write-back-out"}  # reported once
        if kind in ("store", "atomic") and scope == "workgroup":
            facts = facts | {"stored"}
        if kind == "store" and scope == "workgroup":
            facts = facts | {"store-out"} | {f"dirty:{piece}" for piece in self._pieces}
        return facts

    def _judge(self, inst: Instruction, facts: _Facts) -> Iterator[Finding]:
        if inst.is_marker and inst.mnemonic == ("read" if self._reads else "acquire"):
            yield from self._judge_read(inst, facts)
        if inst.mnemonic == "acquire" and inst.is_marker:
            yield from self._judge_acquire(inst, facts)
            return
        if inst.mnemonic == "arrived" and inst.is_marker:
            yield from self._judge_others(inst, facts)
            return
        if inst.mnemonic == "released" and inst.is_marker:
            yield from self._judge_released(inst, facts)
            return
        if inst.mnemonic == "s_barrier" and "lds-out" in facts:
            yield self._finding(
                "lds-wait",
                inst,
                "LDS stores may still be in flight at this barrier; the other waves may read the "
                "old values. Expected s_waitcnt lgkmcnt(0) before it.",
            )
        kind = _access(inst)
        if kind in ("store", "atomic"):
            asked = {f.split(":")[1] for f in facts if f.startswith("release:")}
            scope = _scope(inst, self._rules)
            exact = self._rules.exact_bits
            explicit = scope == "system" or (kind == "store" and scope == "agent")
            if exact and explicit and not self._expected.marked:
                asked.add(scope)
            # The next publication needs this write-back at any scope, so scope bits are not
            # compared.
            if "write-back-out" in facts:
                yield self._finding(
                    "release-write-back-wait",
                    inst,
                    "the write-back before this publication is not waited for. Expected a wait "
                    f"for {self._rules.stores_wait_on} between them.",
                )
            if asked:
                widest = max(asked, key=SCOPES.index)
                yield from self._judge_release(inst, facts, widest)
                if exact and not _reaches(scope, widest):
                    yield self._finding(
                        "release-scope",
                        inst,
                        f"a release of {widest} scope is published by an access of {scope} scope.",
                    )
        if (
            kind == "load"
            and not self._expected.marked
            and _scope(inst, self._rules) == "workgroup"
        ):
            spun = sorted(f.split(":")[1] for f in facts if f.startswith("spun:"))
            if spun:
                yield self._finding(
                    "acquire-invalidate",
                    inst,
                    "this load may follow a polled flag without a cache invalidate that covers "
                    f"{', '.join(spun)} after the flag has arrived; it may return stale data. "
                    f"Expected {self._spelling('acquire', spun)} between them.",
                )

    def _judge_release(self, inst: Instruction, facts: _Facts, scope: str) -> Iterator[Finding]:
        if "store-out" in facts:
            yield self._finding(
                "release-wait",
                inst,
                f"earlier stores may still be in flight when this {scope}-scope publication is "
                f"issued. Expected a wait for {self._rules.stores_wait_on} before it.",
            )
        dirty = sorted(p for p in self._rules.release[scope] if f"dirty:{p}" in facts)
        if dirty:
            yield self._finding(
                "release-write-back",
                inst,
                f"earlier stores may not be written back for {scope} scope. Expected "
                f"{self._spelling('release', dirty)} before this publication.",
            )
        if self._expected.completed_barriers and not self._expected.marked:
            yield from self._judge_others(inst, facts)

    def _judge_others(self, inst: Instruction, facts: _Facts) -> Iterator[Finding]:
        if "others-out" in facts:
            yield self._finding(
                "release-barrier-wait",
                inst,
                "stores of other waves may still be in flight: a barrier before this publication "
                "is passed with stores outstanding, and no wait of this wave covers them. "
                f"Expected a wait for {self._rules.stores_wait_on} before that barrier.",
            )

    def _judge_released(self, inst: Instruction, facts: _Facts) -> Iterator[Finding]:
        scope = inst.operands[0]
        if f"bare:{scope}" in facts:
            yield self._finding(
                "release-missing",
                inst,
                f"a {scope}-scope publication is reached without a release of that scope since "
                "the last one; what was written before it may arrive after it.",
            )

    def _judge_read(self, inst: Instruction, facts: _Facts) -> Iterator[Finding]:
        scope = inst.operands[0]
        if f"unread:{scope}" in facts:
            yield self._finding(
                "acquire-scope",
                inst,
                f"a {scope}-scope acquire is reached without a load or atomic of that scope since "
                "the last one; the flag may be read from a cache that no other writer updates.",
            )

    def _judge_acquire(self, inst: Instruction, facts: _Facts) -> Iterator[Finding]:
        scope = inst.operands[0]
        stale = sorted(c for c in self._rules.acquire[scope] if f"stale:{c}" in facts)
        if stale:
            yield self._finding(
                "acquire-invalidate",
                inst,
                f"a {scope}-scope acquire does not invalidate {', '.join(stale)} after the flag "
                f"has arrived. Expected a wait and then {self._spelling('acquire', stale)}.",
            )

    def _spelling(self, side: str, pieces: list[str]) -> str:
        table = self._rules.invalidates if side == "acquire" else self._rules.writes_back
        needed = set(pieces)
        for (name, bits), covered in table.items():
            if needed <= covered:
                return " ".join([name, *sorted(bits)])
        return " and ".join(
            " ".join([name, *sorted(bits)]) for (name, bits), got in table.items() if got & needed
        )

    def _finding(self, rule: str, inst: Instruction, message: str) -> Finding:
        return Finding(rule, self._function.name, inst.line, inst.text, message)


def check_coherence(
    function: Function, rules: CacheRules, expected: Expectations, stored: bool = True
) -> list[Finding]:
    """All findings of the coherence rules in ``function``, in text order.

    stored: True if the workgroup may have stored something before the function is entered.

    The code must be optimised: in unoptimised code, flat accesses to private memory cannot be
    distinguished from publications.
    """
    # A set, because a function that is called twice is checked twice and has the same findings.
    findings = set(Coherence(function, rules, expected, stored).findings())
    findings |= set(_missing_markers(function, expected))
    return sorted(findings, key=lambda finding: (finding.line, finding.rule))


def _missing_markers(function: Function, expected: Expectations) -> Iterator[Finding]:
    """Findings for acquire and release markers that a function should have and lacks. Without this
    check, a kernel that had lost its markers would pass all rules.
    """
    there = {
        (i.mnemonic, i.operands[0])
        for block in function.blocks
        for i in block.instructions
        if i.is_marker
    }
    owed = [(side, scope) for scope in expected.marked for side in ("acquire", "release")]
    if expected.marked and expected.completed_barriers:
        owed.append(("arrived", "workgroup"))
    for side, scope in owed:
        if (side, scope) not in there:
            message = (
                f"the code has no `ark.{side} {scope}` marker, although its source has some; "
                "nothing shows that such hand-overs are ordered."
            )
            yield Finding("marker", function.name, 0, "", message)
