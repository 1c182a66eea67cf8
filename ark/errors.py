"""The exceptions that ark raises. Their names are those of ARK, the library whose interface ark
also offers. Every message is one paragraph that states what was found, what was expected and what
to do. The command line prints this paragraph and exits with code 2; Python callers get the
exception.
"""


class BaseError(Exception):
    """Base class of all errors that ark raises on purpose.

    Examples:
        >>> try:
        ...     ark.reshape(ark.tensor([4]), [3])
        ... except ark.BaseError as error:
        ...     print(type(error).__name__)
        ModelError
    """


class InternalError(BaseError):
    """ark broke one of its own rules; please report it with the message.

    Examples:
        >>> issubclass(ark.InternalError, ark.BaseError)
        True
    """


class InvalidUsageError(BaseError, ValueError):
    """A call or a command line has arguments that are not valid.

    Examples:
        >>> try:
        ...     ark.init(backend="none")
        ... except ark.InvalidUsageError as error:
        ...     print(error)
        the backend 'none' is not installed; installed are ...
    """


class ModelError(BaseError):
    """A model graph, checkpoint, topology or sketch contradicts itself.

    Examples:
        >>> try:
        ...     ark.reshape(ark.tensor([4]), [3])
        ... except ark.ModelError as error:
        ...     print(error)
        reshape: a tensor of shape [4] has 4 elements and cannot be viewed as [3]
    """


class PlanError(BaseError):
    """A plan cannot be made, or the verifier rejects it.

    Examples:
        >>> with ark.PlannerContext(processor_range=[0, 9999]):
        ...     y = ark.relu(ark.tensor([4]))
        >>> try:
        ...     plan = ark.Planner().plan()
        ... except ark.PlanError as error:
        ...     print(error)
        op 'relu' is restricted to processors 0 to 9998, but ... has ...
    """


class UnsupportedError(BaseError):
    """ark does not support a name of the interface or an operator, in general or on this target.

    Examples:
        >>> try:
        ...     ark.Module()()
        ... except ark.UnsupportedError as error:
        ...     print(error)
        Module has no forward; write one
    """


class SystemError(BaseError):
    """The machine lacks something: a compiler, a driver, memory, a reachable peer.

    Examples:
        >>> try:
        ...     ark.init(backend="cpu", arch="sm_90")
        ... except ark.SystemError as error:
        ...     print(error)
        ark.init was given the architecture 'sm_90', but the devices of 'cpu' are ...
    """


class GpuError(BaseError):
    """The device reported a fault, or a wait exceeded its time limit.

    Examples:
        >>> issubclass(ark.GpuError, ark.BaseError)
        True
    """


REFUSALS = (InvalidUsageError, ModelError, PlanError, UnsupportedError)
"""Errors about a request; another request may avoid them. All other errors are about the machine,
such as a missing package, and do not depend on the request.
"""
