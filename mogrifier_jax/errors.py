"""The one exception that is meant for people.

`main.py` prints its message and exits with code 2; everything else is a bug and
keeps its traceback.
"""


class UsageError(ValueError):
    """Input that cannot work: the message names the value, the rule and the remedy."""
