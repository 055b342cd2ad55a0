"""Removes the passwords of storages from messages."""

import re
import urllib.parse


def hide_password(storage: str) -> str:
    """A storage as messages may show it: a file, or a URL without its password and its options."""
    scheme, separator, rest = storage.partition("://")
    if not separator:
        scheme, rest = "", storage
    if scheme.startswith("sqlite"):
        return storage.partition("?")[0]
    start, at, host = rest.rpartition("@")
    # The path of a file may contain an @, but what precedes it may also be user:password.
    if at and (separator or ":" in start):
        user, colon, _ = start.partition(":")
        rest = f"{user}:***@{host}" if colon else f"***@{host}"
    elif separator:  # After a colon, anything but a port may be a password.
        rest = re.sub(r"^([^/?]*?):(?![0-9]*([/?]|$)).*", r"\1:***", rest)
    # The options after the question mark may have a password as well, under many names.
    rest, question, _ = rest.partition("?") if separator else (rest, "", "")
    return f"{scheme}{separator}{rest}{'?...' if question else ''}"


def remove_secrets(text: str, storage: str) -> str:
    """The message of a library about a storage, without the password and the options of its URL."""
    start = storage.partition("://")[2].rpartition("@")[0]
    values = [start, start.partition(":")[2], *re.split("[&=]", storage.partition("?")[2])]
    for value in (*values, *map(urllib.parse.unquote, values)):
        text = text.replace(value, "***") if len(value) > 2 else text
    return text
