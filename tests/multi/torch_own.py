"""A program that runs torch's own tests of a distributed backend on the backend "ark".

python -m tests.multi.torch_own mpi test_all_reduce_sum test_all_to_all

torch decides at import, from the environment, which tests a backend has, and accepts its own
backends only. So the tests are imported as for one of those (mpi, gloo) and then run on ark. Three
ranks, forked once, run the named tests one after another.
"""

from __future__ import annotations

import os
import sys
import unittest

STANDS_FOR, *NAMES = sys.argv[1:]
os.environ.update(BACKEND=STANDS_FOR, WORLD_SIZE="3", OMP_NUM_THREADS="1")

import torch.multiprocessing  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

import ark.distributed.torch  # noqa: E402

distributed_test.BACKEND = ark.distributed.torch.NAME
os.environ["BACKEND"] = "mpi"  # torch tests groups of two of three ranks for it


class OnArk(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """A test case class with the methods of torch's tests. Its method `test_in_turn` calls the
    named methods.
    """

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def _barrier(self, *args: object, **more: object) -> None:
        """Replaces the barrier of torch's tests, which waits only 10 s for files of other ranks:
        too short on a busy machine.
        """
        torch.distributed.barrier()

    def test_in_turn(self) -> None:
        for name in NAMES:
            try:
                getattr(self, name)()
            except (SystemExit, unittest.SkipTest) as error:
                raise AssertionError(f"{name} was left out: {error}") from error
            except Exception as error:
                raise AssertionError(f"{name} failed: {error}") from error
            self._barrier()


if __name__ == "__main__":
    result = unittest.TextTestRunner().run(OnArk("test_in_turn"))
    sys.exit(not result.wasSuccessful() or bool(result.skipped) or result.testsRun != 1)
