"""SIGTERM, Ctrl-C and preemption: training saves its state and exits with code 75."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from absl import logging
from jax.experimental import multihost_utils

from mogrifier_jax import errors

interrupted = threading.Event()  # Set by `interrupt`, until the command ends.


def interrupt(*_: Any) -> NoReturn:
    """Handles SIGTERM outside of training, where `StopRequests` takes its place.

    A library may swallow the exception, or fail in another way because of it, so the signal is also
    noted in `interrupted`.
    """
    interrupted.set()
    raise errors.Interrupted("stopped; repeat the command to resume from what is saved")


def deliver_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """A `sys.unraisablehook`, which sends a signal again whose exception Python had to ignore.

    A handler runs between any two instructions, also in a destructor or a callback of the garbage
    collector. Python prints an exception that is raised there, and then continues.
    """
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        number = signal.SIGINT
    elif isinstance(unraisable.exc_value, errors.Interrupted):
        number = signal.SIGTERM
    else:
        sys.__unraisablehook__(unraisable)
        return
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    # A moment later, because the callback has not returned yet.
    timer = threading.Timer(0.05, signal.pthread_kill, (main_thread, number))
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Delays SIGTERM to the end of a block whose libraries do not expect exceptions."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requests: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: requests.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
    if requests:
        signal.raise_signal(signal.SIGTERM)


class StopRequests:
    """Notes requests to stop; call `requested()` between dispatches, equally often in each process.

    With `jax.distributed`, the runtime itself listens for SIGTERM and makes every process stop at
    the same call. Otherwise SIGTERM and the first Ctrl-C are noted, and a second Ctrl-C interrupts
    at once.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._signal: int | None = signal.SIGTERM if interrupted.is_set() else None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and not jax.distributed.is_initialized():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def check(self) -> None:
        """Raises `Interrupted` if a stop was requested before there is anything to save."""
        if self._signal is not None:
            raise errors.Interrupted("stopped before the first step; repeat the command to resume")

    def requested(self) -> bool:
        """Whether to save and stop now; the same answer in every process."""
        if jax.distributed.is_initialized():
            # The runtime picks a call number, and every process stops at that call.
            self._calls += 1
            return multihost_utils.reached_preemption_sync_point(self._calls)
        return self._signal is not None

    def _note(self, number: int, _) -> None:
        if self._signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self._signal = number
        hint = "; again to stop at once" if number == signal.SIGINT else ""
        logging.warning("%s: saving and stopping%s", signal.Signals(number).name, hint)
