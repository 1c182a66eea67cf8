"""The exceptions that ark raises, with ARK's names.

Every message is one paragraph for a person: what was found, what was expected, what to do. The
command line prints that paragraph and exits with 2; Python callers get the exception.
"""


class BaseError(Exception):
    """Base class of all errors that ark raises on purpose."""


class InternalError(BaseError):
    """ark broke one of its own rules; please report it with the message."""


class InvalidUsageError(BaseError, ValueError):
    """A call or a command line has arguments that are not valid."""


class ModelError(BaseError):
    """A model graph, checkpoint, topology or sketch contradicts itself."""


class PlanError(BaseError):
    """A plan cannot be made, or the verifier rejects it."""


class UnsupportedError(BaseError):
    """ark does not support a name of the interface or an operator, in general or on this target."""


class SystemError(BaseError):
    """The machine lacks something: a compiler, a driver, memory, a reachable peer."""


class GpuError(BaseError):
    """The device reported a fault, or a wait exceeded its time limit."""


REFUSALS = (InvalidUsageError, ModelError, PlanError, UnsupportedError)
"""Errors about a request; another request may avoid them. All other errors are about the machine,
such as a missing package, and do not depend on the request.
"""
