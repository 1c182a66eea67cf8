"""Runs AMD devices on the CPU: an emulator of their machine code, and a stand-in for the HIP
library that uses it.

The ROCm backend's tests run on it where no AMD GPU is available. `activate` (or the context manager
`emulated`) makes the unmodified hip-python use emulated devices. `describe` returns a sentence that
names the emulated devices.
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
