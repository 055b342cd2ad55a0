"""The errors that end a run with a sentence for people.

`main.py` prints the message of these without a traceback, and exits with their code. Any other
error is a bug and keeps its traceback.
"""


class UsageError(ValueError):
    """Input that cannot work: the message names the value, the rule and the remedy."""

    exit_code = 2


def check(condition: bool, message: str) -> None:
    """Raises a UsageError unless the condition holds."""
    if not condition:
        raise UsageError(message)


class Diverged(RuntimeError):
    """The numbers of a run are no longer finite."""

    exit_code = 3


class Interrupted(RuntimeError):
    """The run was stopped on request and is saved; a launcher should start it again."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again.
