"""The CPU backend: a full backend whose processors are threads. It is the default where there is no
GPU, and runs the same plans and task bodies as every other vendor under real concurrency.
"""

from ark_cpu.backend import CpuBackend

backend = CpuBackend()

__all__ = ["backend"]
