"""One log line format for every process. The launcher sends each process's output to `logs/NAME.stdout`."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(process_name)s | %(message)s"


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(f"trireme.{name}")


def start_logging(process: str, level: str = "info") -> None:
    """Sends the `trireme` loggers to standard output, flushed per line. Called by doors only."""

    class _Named(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            record.process_name = process
            return True

    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(_Named())
    logger = logging.getLogger("trireme")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
