"""What every part of the configuration is: frozen, typed, and strict about its keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the configuration file. Unknown keys are refused; values never change after loading.

    The sentence under each field is its documentation: `rl --help` prints it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
