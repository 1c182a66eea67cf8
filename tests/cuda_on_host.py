"""Runs CUDA's task bodies on a CPU, one thread at a time, up to their first wait.

Every op of a plan under the variant `roles` is dispatched by the same source that a GPU gets, for
each computing thread of a block. `ark_enter` tells the thread to leave, so the accesses that the
recorder of tests.touch has seen are those that a body makes before the end of its task's waits.
Inline assembly is converted to C++ by a rule: instructions that begin with `ld.` load, and all
others return zeros.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from ark_cuda import backend

from ark.backend.codegen.dialect import Dialect
from ark.plan.types import Plan

SHIM = Path(__file__).parent / "cuda_on_host.h"
ENTER = "ARK_DEVICE bool ark_enter(ArkCtx&) {"
STRING = r'"((?:[^"\\]|\\.)*)"'
# All threads leave the body here. The compiler cannot see that they always do, so it moves no read
# across this point.
LEAVE = f"""
static bool host_entered;
static volatile bool host_goes = false;
{ENTER}
  host_entered = true;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  return host_goes;"""
# The end of the source, after the bodies. The task list selects the body to run, and the computing
# threads run it one after another.
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
    """CUDA's dialect for a plan's machine, with the host's prelude and entry point."""
    result = backend.dialect(str(plan.machine["arch"]))
    assert ENTER in result.roles
    leaving = result.roles.replace(ENTER, LEAVE, 1)
    return dataclasses.replace(result, roles=leaving, entry=ENTRY)


def on_host(text: str) -> str:
    """Converts device source to C++. Only NVRTC uses an array's size in overload resolution."""
    return SHIM.read_text() + assembly(text.replace("float (&v)[2 * N]", "float* v"), _statement)


def assembly(text: str, statement: Callable[[str], str]) -> str:
    """Replaces every assembly statement by the result of `statement` for the text in its
    brackets.
    """
    results, at = [], 0
    for actual in re.finditer(r"\basm\s*(volatile)?\s*\(", text):
        end = _closing(text, actual.end())
        results += [text[at : actual.start()], statement(text[actual.end() : end])]
        at = end + 1
    return "".join((*results, text[at:]))


def parts(inside: str) -> tuple[str, list[str], list[str]]:
    """Returns the template of an assembly statement (its instructions with placeholders), and the
    C++ expressions of its results and of its inputs.
    """
    words = re.sub(rf"^(\s*{STRING})+", "", inside)
    template = "".join(re.findall(STRING, inside[: len(inside) - len(words)]))
    return template, _bracketed(words, r'"[=+]\w+"\s*\('), _bracketed(words, r'"\w+"\s*\(')


def _closing(text: str, at: int) -> int:
    """The position of the bracket that closes the one before `at`. Strings are skipped."""
    depth = 1
    while depth:
        if text[at] == '"':
            at = text.index('"', at + 1)
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _statement(inside: str) -> str:
    """Converts an assembly statement to C++. Its inputs are used, so that the compiler keeps
    them.
    """
    template, results, given = parts(inside)
    if template.lstrip().startswith(
        "ld."
    ):  # the address is the first input; a cache policy may follow
        return f"host_load({', '.join((given[0], *results))})"
    return f"(host_take({', '.join(given)}), host_give({', '.join(results)}))"


def _bracketed(words: str, opening: str) -> list[str]:
    """The text in the brackets that the pattern opens."""
    ends = [actual.end() for actual in re.finditer(opening, words)]
    return [words[end : _closing(words, end)] for end in ends]
