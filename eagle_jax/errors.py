"""Errors meant for the person at the keyboard: what was expected, what came, what to do.

The command line prints their message without a traceback. Anything else that escapes is a bug.
"""


class EagleError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(EagleError, ValueError):
    """An argument, option or file that cannot be used as given; exit code 2 on the command line."""


class FormatError(InputError):
    """A file that is corrupt, incomplete, or of another kind than expected."""


class DownloadError(EagleError, RuntimeError):
    """Weights could not be fetched or put into the cache: network, checksum or disk."""
