"""Mutated collective programs in the three formats that ark reads: its own JSON, MSCCL XML and
MSCCL++ execution plans. An accepted program must do what its collective defines, executed in NumPy
in several of the orders that it permits. The formats it is then written to must be readable again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from xml.etree import ElementTree

import numpy as np

from ark.collective import topology as networks
from ark.collective.programs import (
    CollectiveProgram,
    check,
    execute,
    from_execution_plan,
    from_json,
    from_xml,
    reference_result,
    to_execution_plan,
    to_json,
    to_xml,
)
from ark.collective.synthesis import synthesize
from ark.errors import BaseError
from tests.fuzz import WrongResultError, mutate

Keep = Callable[[str], None]
MOST_OPERATIONS = 2000  # only programs of at most so many operations are executed


@cache
def _programs() -> tuple[CollectiveProgram, ...]:
    mesh = networks.full_mesh(3)
    names = (("all_reduce", "ring"), ("all_gather", "ring"), ("all_reduce", "forestcoll"))
    return tuple(synthesize(mesh, collective, how) for collective, how in names)


def program(rng: random.Random, keep: Keep) -> bool:
    """The target: a mutated program in ark's own JSON."""
    base = json.loads(to_json(rng.choice(_programs())))
    text = mutate.text_of(mutate.of_json(base, rng))
    keep(text)
    return run_program(text)


def run_program(text: str) -> bool:
    try:
        program = from_json(text)
        check(program)
        ElementTree.fromstring(to_xml(program))
    except BaseError:
        return False
    _try(program)
    return True


def xml(rng: random.Random, keep: Keep) -> bool:
    """The target: a mutated program as MSCCL XML."""
    text = to_xml(rng.choice(_programs()))
    if rng.random() < 0.85:
        root = ElementTree.fromstring(text)
        for _ in range(rng.choice((1, 1, 2, 3))):
            _change(root, rng)
        text = ElementTree.tostring(root, encoding="unicode")
    else:
        text = mutate.of_bytes(text.encode(), rng).decode("utf-8", "replace")
    keep(text)
    return run_xml(text)


def _change(root: ElementTree.Element, rng: random.Random) -> None:
    """Makes one random change: an attribute gets a near or an odd value or is dropped, or an
    element is dropped, doubled or moved.
    """
    parent = rng.choice([e for e in root.iter() if len(e)] or [root])
    element = rng.choice([*parent, root])
    move = rng.random()
    if move < 0.7 and element.attrib:
        name = rng.choice(sorted(element.attrib))
        old = element.get(name, "")
        if move < 0.1:
            del element.attrib[name]
        elif move < 0.4 and old.lstrip("-").isdecimal():
            element.set(name, str(int(old) + rng.choice((-1, 1, 2, 64, 1 << 20))))
        elif move < 0.55:
            element.set(name, rng.choice(["s", "r", "rrc", "cpy", "nop", "i", "o", "0", "1"]))
        else:
            odd = (n for n in (*mutate.NUMBERS, -1, "", "²", "a" * 5000, "nan", " 1", "1_0"))
            element.set(name, str(rng.choice(list(odd))))
    elif element is root:
        element.set("extra", "1")
    elif move < 0.8:
        parent.remove(element)
    elif move < 0.9:
        parent.append(element)
    else:
        parent.remove(element)
        parent.insert(rng.randrange(len(parent) + 1), element)


def run_xml(text: str) -> bool:
    try:
        program = from_xml(text)
    except BaseError:
        return False
    _try(program)
    check(from_json(to_json(program)))
    return True


def execution_plan(rng: random.Random, keep: Keep) -> bool:
    """The target: a mutated MSCCL++ execution plan."""
    base = json.loads(to_execution_plan(rng.choice(_programs()[:2])))
    text = mutate.text_of(mutate.of_json(base, rng))
    keep(text)
    return run_execution_plan(text)


def run_execution_plan(text: str) -> bool:
    try:
        program = from_execution_plan(text)
    except BaseError:
        return False
    _try(program)
    check(from_json(to_json(program)))
    return True


def _try(program: CollectiveProgram) -> None:
    """Executes a program in three orders if it is small enough. Raises WrongResultError if a result
    differs from its collective's.
    """
    if program.ranks > 8 or sum(len(own) for own in program.operations) > MOST_OPERATIONS:
        return
    size = program.ranks * 6
    inputs = [np.arange(size) * (r + 2) % 13 + r for r in range(program.ranks)]
    reduction = program.reduction or "sum"
    try:
        wanted = reference_result(program.collective, inputs, reduction, program.root)
        for order in (None, 0, 1):
            outputs = execute(program, inputs, order)
            if any(
                w is not None and (f is None or not np.array_equal(f, w))
                for f, w in zip(outputs, wanted, strict=True)
            ):
                raise WrongResultError(f"{program.name}: {outputs} instead of {wanted}"[:1000])
    except BaseError as error:
        raise WrongResultError(f"{program.name} was accepted, and ends with: {error}") from error
