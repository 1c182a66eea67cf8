"""The switch statements of a loop kernel that call a task's function by its opcode. Called by
ark.codegen.writer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ark.codegen.bodies import Bodies


def dispatch(bodies: Bodies, seldom: Collection[int]) -> str:
    """The switch over the functions that computing warps run and, if a warp leads, the switch over
    those for which it polls. seldom: bodies that are called through a second function, so that
    their register needs do not cause spills in the other bodies.
    """
    # The loop waits for a task before the call, unless functions of this kernel wait themselves.
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
    """The C++ switch over the functions that execute several tasks without block barriers."""
    names, kinds = bodies.names, sorted(bodies.runs)
    lines = "".join(f"    case {i}u: {names[i]}(c, tasks, count); return;\n" for i in kinds)
    return (
        "ARK_DEVICE void ark_dispatch_run(ArkCtx& c, const ArkTask* tasks, ark_u32 count) {\n"
        f"  switch (tasks->kind) {{\n{lines}    default:\n"
        "      for (ark_u32 n = 0u; n < count; ++n) ark_dispatch(c, tasks[n]);\n  }\n}\n"
    )


def dispatch_load(bodies: Bodies) -> str:
    """Functions that say which opcodes have separate loads and which do not use the stages' memory,
    and the switch over the loads.
    """
    names, kinds = bodies.names, sorted(bodies.halves)
    lines = "".join(f"    case {i}u: {names[i]}_load(c, t, load); return;\n" for i in kinds)
    spares = _any_of(bodies.spares)
    return (
        f"ARK_DEVICE bool ark_loads(ark_u32 kind) {{ return {_any_of(kinds)}; }}\n"
        f"ARK_DEVICE bool ark_spares_stages(ark_u32 kind) {{ return {spares}; }}\n"
        "ARK_DEVICE void ark_dispatch_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load) {\n"
        f"  switch (t.kind) {{\n{lines}    default: return;\n  }}\n}}\n"
    )


def _any_of(codes: Collection[int]) -> str:
    return " || ".join(f"kind == {i}u" for i in sorted(codes)) or "false"


def dispatch_move(bodies: Bodies) -> str:
    """The C++ switch over the functions that moving warps execute."""
    names, kinds = bodies.names, sorted(bodies.moved)
    lines = "".join(f"    case {i}u: {names[i]}_move(t); return;\n" for i in kinds)
    return (
        "ARK_DEVICE void ark_dispatch_move(const ArkTask& t) {\n"
        f"  switch (t.kind) {{\n{lines}    default: return;\n  }}\n}}\n"
    )
