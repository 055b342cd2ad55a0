"""What a run says to people when it ends early.

`main.py` prints the message of these, without a traceback, and exits with their code;
everything else is a bug and keeps its traceback.
"""


class UsageError(ValueError):
    """Input that cannot work: the message names the value, the rule and the remedy."""

    exit_code = 2


class Diverged(RuntimeError):
    """The numbers of a run are no longer finite."""

    exit_code = 3


class Interrupted(RuntimeError):
    """Stopped on request, with everything saved: launchers should start the run again."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again.


class Abandoned(RuntimeError):
    """A run is not worth going on with; whoever started it knows why."""
