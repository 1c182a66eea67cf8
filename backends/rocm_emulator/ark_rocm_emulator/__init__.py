"""AMD devices on the CPU: an emulator of their machine code, and a stand-in for HIP on top of it.

The ROCm backend's tests run on it where there is no AMD GPU: `activate` (or the context manager
`emulated`) puts emulated devices under the unmodified hip-python, `describe` says so in words.
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
