"""What a test starts must heed Ctrl-C, even where the tests themselves do not."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def heed_interrupts() -> None:
    """For `preexec_fn`: a background job of a shell ignores SIGINT, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt in this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
