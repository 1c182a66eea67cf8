"""Runs AMD GPU programs on the CPU: an emulator of the GPUs' machine code, and a replacement for
the HIP library, which runs kernels on the emulator.

The ROCm backend's tests run on the emulator where no AMD GPU is available. `activate` (or the
context manager `emulated`) makes the unmodified hip-python use emulated devices. `describe` returns
a sentence that names the emulated devices.
"""

from ark_rocm_emulator.device import (
    Activation,
    ErrorKind,
    Failure,
    activate,
    active,
    describe,
    emulated,
    failures,
    instructions,
    set_option,
)

__all__ = [
    "Activation",
    "ErrorKind",
    "Failure",
    "activate",
    "active",
    "describe",
    "emulated",
    "failures",
    "instructions",
    "set_option",
]
