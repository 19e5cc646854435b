"""What a test starts must heed Ctrl-C, even where the tests themselves do not."""

import signal


def heed_interrupts() -> None:
    """For `preexec_fn`: a background job of a shell ignores SIGINT, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
