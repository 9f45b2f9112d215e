"""Errors of gradient communication."""


class CommError(Exception):
    """Base of everything that `resilient_run.comm` raises on purpose; the message names the value and the remedy."""


class OpError(CommError, ValueError):
    """An operation was called with tensors it is not defined for."""


class MessageError(CommError):
    """What another rank sent is not what the scheme defines: the ranks run different versions or options."""


class FileError(CommError):
    """A model, system or plan file is not valid."""
