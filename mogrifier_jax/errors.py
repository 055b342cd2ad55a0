"""The errors that end a command with one sentence and an exit code instead of a traceback.

`main.py` prints their messages and exits with their codes. Any other exception is a bug and keeps
its traceback.
"""


class UsageError(ValueError):
    """Input that cannot work: the message names the value, the rule and the remedy."""

    exit_code = 2


def show(value: object) -> str:
    """A value for use in a sentence: on one line, and not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def check(condition: bool, message: str) -> None:
    """Raises a UsageError unless the condition holds."""
    if not condition:
        raise UsageError(message)


class Diverged(RuntimeError):
    """The loss, a score or a weight of a run is no longer finite."""

    exit_code = 3


class Interrupted(BaseException):
    """The run was saved and stopped on request; a launcher should start it again.

    Like KeyboardInterrupt it is no Exception: SIGTERM can arrive anywhere, and `except Exception`
    would take it for a damaged file or for a mistake in an experiment.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again.
