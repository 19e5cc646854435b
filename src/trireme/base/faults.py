"""Faults that tests ask for, through `TRIREME_FAULTS="name=value,name=value"`. Without it every call here is a no-op.

Production code names a place where something can go wrong; a test makes it go wrong there, in the real process.

Example:
    TRIREME_FAULTS="skip_tensor=model.norm.weight"
"""

from __future__ import annotations

import os


def fault(name: str) -> str | None:
    """The value of a fault that a test asked for, or None."""
    for part in os.environ.get("TRIREME_FAULTS", "").split(","):
        key, _, value = part.partition("=")
        if key == name:
            return value
    return None
