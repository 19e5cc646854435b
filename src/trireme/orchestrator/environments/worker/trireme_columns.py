"""Fields of an environment's state that somebody asked to see, once a rollout is scored."""

from collections.abc import Mapping
from typing import Any


def columns_of(adapter: Any, played: Any, names: list[str]) -> dict:
    """Fields of the `done` message: `columns`, and `state_keys` where one that was asked for is not there.

    Example:
        columns_of(adapter, played, ["guesses", "gone"])  # {"columns": {"guesses": 3}, "state_keys": ["answer", ...]}
    """
    if not names:
        return {}
    state = _state(played)
    found = {name: state[name] for name in names if name in state}
    if "parsed_answer" in names and "parsed_answer" not in found:
        found |= _parsed_answer(adapter, state)
    missing = [name for name in names if name not in found]
    return {"columns": found, **({"state_keys": sorted(map(str, state))} if missing else {})}


def _state(played: Any) -> Mapping:
    """Of verifiers its state, of a plain environment its example with the notes kept in it, of v1 the result."""
    for holder in (getattr(played, "state", None), getattr(played, "example", None), played):
        if isinstance(holder, Mapping):
            return holder
    return {}


def _parsed_answer(adapter: Any, state: Mapping) -> dict:
    """What the environment's parser reads in the completion, where it has one."""
    parser = getattr(getattr(adapter, "_environment", None), "parser", None)
    if parser is None:
        return {}
    try:
        return {"parsed_answer": parser.parse_answer(state.get("completion"))}
    except Exception as error:  # a parser is the environment's code, and this rollout is scored already
        return {"parsed_answer": f"(the parser failed: {type(error).__name__}: {error})"}
