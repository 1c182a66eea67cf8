"""CUDA's task bodies on a CPU, one thread at a time, as far as they come before they wait.

Every op of a plan under the variant `roles` is dispatched by the very source that a GPU gets, for
each computing thread of a block, with `ark_enter` telling it to leave: what the recorder of
tests.touch saw until then is what a body reads before its task's waits are met. Inline assembly
is put into C++ by a rule: what begins with `ld.` loads, all else gives zeros.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from ark_cuda import backend

from ark.codegen.dialect import Dialect
from ark.plan.types import Plan

SHIM = Path(__file__).parent / "cuda_on_host.h"
ENTER = "ARK_DEVICE bool ark_enter(ArkCtx&) {"
STRING = r'"((?:[^"\\]|\\.)*)"'
# All leave. The compiler does not know it, nor moves a read over this: each stays where it is.
LEAVE = f"""
static bool host_entered;
static volatile bool host_goes = false;
{ENTER}
  host_entered = true;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  return host_goes;"""
# Behind the bodies: the task's list names the one to run; every computing thread in turn.
ENTRY = """
__attribute__((aligned(128))) char ark_shared[1 << 18];
extern "C" void ark_touch(const ArkParams* params, char* scratch) {
  static ArkCtx c;
  const ArkRange range = reinterpret_cast<const ArkRange*>(params->ranges)[0];
  const ArkTask& task = reinterpret_cast<const ArkTask*>(params->tasks)[range.task_begin];
  for (unsigned i = 0u; i < ARK_THREADS; ++i) {
    threadIdx.x = i;
    ark_open_loop(c, params, 0u, scratch);
    host_entered = false;
    if (ark_dispatch(c, task) || !host_entered) __builtin_trap();
  }
}
"""


def dialect(plan: Plan) -> Dialect:
    """CUDA's dialect for a plan's machine, with a host's prelude around it."""
    result = backend.dialect(str(plan.machine["arch"]))
    assert ENTER in result.roles
    leaving = result.roles.replace(ENTER, LEAVE, 1)
    return dataclasses.replace(result, roles=leaving, entry=ENTRY)


def on_host(text: str) -> str:
    """Device source as C++. An array's size takes part in overloading for NVRTC alone."""
    return SHIM.read_text() + assembly(text.replace("float (&v)[2 * N]", "float* v"), _statement)


def assembly(text: str, statement: Callable[[str], str]) -> str:
    """The text with what `statement` makes of what stands in an assembly statement's brackets."""
    results, at = [], 0
    for actual in re.finditer(r"\basm\s*(volatile)?\s*\(", text):
        end = _closing(text, actual.end())
        results += [text[at : actual.start()], statement(text[actual.end() : end])]
        at = end + 1
    return "".join((*results, text[at:]))


def parts(inside: str) -> tuple[str, list[str], list[str]]:
    """An assembly statement's template, its results and what it is given."""
    template = "".join(re.findall(STRING, inside.split(":", 1)[0]))
    words = re.sub(rf"^(\s*{STRING})+", "", inside)
    return template, _bracketed(words, r'"[=+]\w+"\s*\('), _bracketed(words, r'"\w+"\s*\(')


def _closing(text: str, at: int) -> int:
    """The place of the bracket that closes the one before `at`; strings are passed over."""
    depth = 1
    while depth:
        if text[at] == '"':
            at = text.index('"', at + 1)
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _statement(inside: str) -> str:
    """An assembly statement's C++. What it takes is used, so that the compiler keeps it."""
    template, results, given = parts(inside)
    if template.lstrip().startswith(
        "ld."
    ):  # from the first one, beside which there may be a policy
        return f"host_load({', '.join((given[0], *results))})"
    return f"(host_take({', '.join(given)}), host_give({', '.join(results)}))"


def _bracketed(words: str, opening: str) -> list[str]:
    """What stands in the brackets that the pattern opens."""
    ends = [actual.end() for actual in re.finditer(opening, words)]
    return [words[end : _closing(words, end)] for end in ends]
