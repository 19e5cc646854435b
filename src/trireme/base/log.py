"""One log line format for every process. The launcher sends each process's output to `logs/NAME.stdout`."""

from __future__ import annotations

import logging
import sys
import time

EVERY_S = 5.0  # between two lines of one kind that may come often
FORMAT = "%(asctime)s %(levelname)-7s %(process_name)s | %(message)s"


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(f"trireme.{name}")


def start_logging(process: str, level: str = "info") -> None:
    """Send the `trireme` loggers to standard output, flushed per line. Called by commands only."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S", defaults={"process_name": process}))
    logger = logging.getLogger("trireme")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class RateLimitedLog:
    """Rate-limited warnings for events that may come a thousand times a second: one line per `EVERY_S`, with a count.

    Example:
        rate_limited = RateLimitedLog(log)
        rate_limited.warning("%s was refused: %s", asker, error)  # "... (and 812 like it)"
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said_at: dict[str, float] = {}  # `time.monotonic()` of the last line, keyed by its text without values
        self._unsaid: dict[str, int] = {}  # lines left out since then, by the same key

    def warning(self, text: str, *values: object, exc_info: BaseException | None = None) -> None:
        now = time.monotonic()
        if now - self._said_at.get(text, -EVERY_S) < EVERY_S:
            self._unsaid[text] = self._unsaid.get(text, 0) + 1
            return
        self._said_at[text] = now
        unsaid = self._unsaid.pop(text, 0)
        self._log.warning(text + (f" (and {unsaid} like it)" if unsaid else ""), *values, exc_info=exc_info)
