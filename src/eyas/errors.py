"""Every error Eyas raises on purpose, in one tree.

A message says what was given, what is wrong with it and what would work. The command line prints the
message alone; a traceback is for our bugs, never for a user's mistake.
"""


class EyasError(Exception):
    """Base of every deliberate error."""


class InvalidInputError(EyasError, ValueError):
    """A value, option or combination of options that cannot work."""


class CheckpointError(EyasError):
    """A file that is missing, damaged, or does not hold what its name promises."""


class UnsupportedModelError(EyasError):
    """A model (or one feature of it) that this engine cannot run losslessly."""


class ContextLengthError(InvalidInputError):
    """A prompt that leaves no room for a single new token."""


class FetchError(EyasError):
    """A download that could not be completed or does not match its checksum."""


class NotEnoughMemoryError(EyasError):
    """A model, or a context, for which there is not enough memory."""
