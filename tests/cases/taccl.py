"""Cases and helpers of tests/unit/collective/test_taccl.py, which other tests use too."""

import numpy as np

from ark.collective.programs import Kind, check, execute, reference_result


def prove(program, topology, seed=0):
    """Asserts that the checker accepts the program and that its results on integers equal
    NumPy's.
    """
    check(program)
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(-99, 99, 6 * program.ranks) for _ in range(program.ranks)]
    wanted = reference_result(program.collective, inputs, program.reduction or "sum")
    for got, want in zip(execute(program, inputs, seed=seed), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    for rank, ops in enumerate(program.operations):
        for op in ops:
            if op.kind is Kind.PUT:
                assert op.route[0] == topology.ranks[rank]
                assert op.route[-1] == topology.ranks[op.peer]
