"""Writes the C++ switch statements by which a loop kernel calls the function of a task, given the
opcode in the task's record. Called by ark.backend.codegen.writer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ark.backend.codegen.bodies import Bodies
from ark.backend.codegen.layout import RECORD_OPERANDS


def dispatch(bodies: Bodies, seldom: Collection[int]) -> str:
    """The source of ark_dispatch, the switch by which computing warps call the function of a task.
    If the kernel has a leading warp (a warp that polls for the inputs of tasks), its switch
    ark_dispatch_poll follows. seldom: the opcodes of functions that are called by a separate
    function, ark_dispatch_seldom, so that their use of registers does not cause spills in
    ark_dispatch.
    """
    # Some device functions wait for their tasks' counters themselves. If the kernel has such
    # functions, the loop does not wait before the switch. Instead, the switch waits in the cases of
    # all other functions.
    enter = "if (!ark_enter(c)) return false;" if bodies.leads or bodies.entering else ""
    lines: dict[bool, list[str]] = {False: [], True: []}
    for code, name in enumerate(bodies.names):
        if code in bodies.moved:
            continue
        if code in bodies.polled or code in bodies.entering:
            run = f"return {name}(c, t);"
        elif code in bodies.runs:
            run = f"{name}(c, &t, 1u); return true;"
        else:
            run = f"{enter} {name}(c, t); return true;".lstrip()
        lines[code in seldom].append(f"    case {code}u: {run}\n")
    unknown = f"      {enter}\n" if enter else ""
    unknown += f"      ark_fail(c, 5u, 0u, {len(bodies.names)}u, t.kind);\n      return true;\n"
    source = ""
    if lines[True]:
        source += _switch("ARK_BODY bool ark_dispatch_seldom", "", lines[True], unknown)
        unknown = "      return ark_dispatch_seldom(c, t);\n"
    begins = "  ark_task_begins(c);\n" if bodies.loads else ""
    source += _switch("ARK_DEVICE bool ark_dispatch", begins, lines[False], unknown)
    return source + _poll(bodies) if bodies.leads else source


def _switch(function: str, first: str, lines: Sequence[str], unknown: str) -> str:
    return (
        f"{function}(ArkCtx& c, const ArkTask& t) {{\n{first}  switch (t.kind) {{\n"
        f"{''.join(lines)}    default:\n{unknown}  }}\n}}\n"
    )


def _poll(bodies: Bodies) -> str:
    lines = (f"    case {i}u: {bodies.names[i]}_poll(c, t); break;" for i in sorted(bodies.polled))
    return (
        "ARK_DEVICE void ark_dispatch_poll(ArkCtx& c, const ArkTask& t) {\n"
        "  switch (t.kind) {\n" + "\n".join(lines) + "\n    default: break;\n  }\n}\n"
    )


def dispatch_run(bodies: Bodies) -> str:
    """The source of ark_dispatch_run, the switch over the functions that execute several tasks
    without block barriers between them.
    """
    names, kinds = bodies.names, sorted(bodies.runs)
    lines = "".join(f"    case {i}u: {names[i]}(c, tasks, count); return;\n" for i in kinds)
    return (
        "ARK_DEVICE void ark_dispatch_run(ArkCtx& c, const ArkTask* tasks, ark_u32 count) {\n"
        f"  switch (tasks->kind) {{\n{lines}    default:\n"
        "      for (ark_u32 n = 0u; n < count; ++n) ark_dispatch(c, tasks[n]);\n  }\n}\n"
    )


def dispatch_load(bodies: Bodies) -> str:
    """The source of four functions for loading warps. ark_loads is true for opcodes with a separate
    function for loads. ark_spares_stages is true for opcodes that do not write to the stages
    (shared-memory buffers) of loading warps. ark_maps returns where a task's record has box maps:
    16 times the place of the first one, plus their number. ark_dispatch_load is the switch over the
    functions for loads.
    """
    names, kinds = bodies.names, sorted(bodies.halves)
    lines = "".join(f"    case {i}u: {names[i]}_load(c, t, load); return;\n" for i in kinds)
    spares = _any_of(bodies.spares)
    return (
        f"ARK_DEVICE bool ark_loads(ark_u32 kind) {{ return {_any_of(kinds)}; }}\n"
        f"ARK_DEVICE ark_u32 ark_maps(ark_u32 kind) {{\n  switch (kind) {{\n{_map_places(bodies)}"
        "    default: return 0u;\n  }\n}\n"
        f"ARK_DEVICE bool ark_spares_stages(ark_u32 kind) {{ return {spares}; }}\n"
        "ARK_DEVICE void ark_dispatch_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load) {\n"
        f"  switch (t.kind) {{\n{lines}    default: return;\n  }}\n}}\n"
    )


def _map_places(bodies: Bodies) -> str:
    """The switch cases of ark_maps, which returns where a task's record has the addresses of box
    maps, by the task's opcode. If an op has too many operands for the record, its cases are
    omitted, because the addresses are then in a list.
    """
    places = ((code, first, len(bodies.maps[code])) for code, first in bodies.halves.items())
    return "".join(
        f"    case {code}u: return {16 * first + count}u;\n"
        for code, first, count in sorted(places)
        if first + count < RECORD_OPERANDS
    )


def _any_of(codes: Collection[int]) -> str:
    return " || ".join(f"kind == {i}u" for i in sorted(codes)) or "false"


def dispatch_move(bodies: Bodies) -> str:
    """The C++ source of ark_dispatch_move, the switch by which moving warps (warps that only move
    data) call the function of a task.
    """
    names, kinds = bodies.names, sorted(bodies.moved)
    lines = "".join(f"    case {i}u: {names[i]}_move(t); return;\n" for i in kinds)
    return (
        "ARK_DEVICE void ark_dispatch_move(const ArkTask& t) {\n"
        f"  switch (t.kind) {{\n{lines}    default: return;\n  }}\n}}\n"
    )
