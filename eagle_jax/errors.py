"""Errors meant for the person at the keyboard: what was expected, what came, what to do."""


class EagleError(Exception):
    """Base of all errors that this library raises on purpose."""


class InputError(EagleError, ValueError):
    """Bad input; the command line answers it with exit code 2."""


class FormatError(InputError):
    """A file is corrupt, or does not match what it should hold."""


class DownloadError(EagleError, RuntimeError):
    """Weights could not be fetched."""
