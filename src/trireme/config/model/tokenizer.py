"""A tokenizer as transformers opens it, for processes without torch.

The ids of a conversation follow from a dozen files and from the class that transformers chooses, and some classes
build pre-tokenizers of their own. So transformers itself opens the folder, in a process without torch (2 s), and writes
what it found. That is kept in the user's cache by the content of the folder's files.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from trireme.base.errors import ConfigError

FILES = ["config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"]
FILES += [
    "chat_template*",
    "additional_chat_templates/*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
]
"""Patterns of the files of a model that decide how a conversation becomes ids."""

VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")
"""Patterns of files with tokens. Without one, some classes of transformers open as an empty tokenizer."""

DESCRIBER = "trireme.trainer.tokenizer"  # the module that has transformers open it
FORMAT = "2"  # version of `OpenedTokenizer`: raise it when a field changes
TIMEOUT_S = 300.0
NUM_HIGHEST = 64

OF_SENSES = re.compile(r"image|video|audio|vision|speech|^[be]o[iav]_")
"""Names of special tokens, such as image_token and boi_token."""


class OpenedTokenizer(msgspec.Struct, frozen=True):
    """A tokenizer as transformers opened it."""

    tokenizer: str  # a tokenizer.json
    special_tokens: dict[str, str]  # variables of chat templates: {"eos_token": "<|im_end|>"}
    templates: dict[str, str]  # keyed by name: "default", and sometimes "tool_use"
    highest: list[tuple[str, int]]  # tokens with the highest ids; no class defaults that the template does not use
    splits_special: bool  # special tokens in a text are text
    cleans_up: bool  # decoded text is cleaned of spaces
    eos_token_id: int | None
    turn_end: tuple[str, int] | None  # the token with which the template ends a turn of the assistant, if there is one
    undefined: list[str]  # special tokens that the template uses and nothing defines
    refusal: str | None  # the error of a template that one of them keeps from rendering anything


def read_tokenizer(name: str, folder: Path, *, trust_remote_code: bool = False) -> OpenedTokenizer:
    """Return how transformers opens a tokenizer.

    Args:
        name: as a user gives it: transformers makes exceptions for some names on a hub.
        folder: the folder of its files on this disk.

    Raises: ConfigError with transformers' words if it does not open it.
    """
    if not has_vocabulary(folder):
        raise ConfigError(
            f"{folder / 'tokenizer.json'} does not exist - the tokenizer's fast form was expected there. Save it with "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(folder)`."
        )

    # The digest covers all that the result depends on: versions, consent to foreign code, and the files. A name counts
    # only if it is one on a hub.
    is_here = Path(name).is_dir()
    kept = [FORMAT, *(version(package) for package in ("transformers", "tokenizers"))]
    kept += [str(trust_remote_code), "" if is_here else name]
    digest = hashlib.sha256("\0".join(kept).encode())
    patterns = [*FILES, "*.py"] if trust_remote_code else FILES
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}):
        digest.update(f"\0{file.relative_to(folder)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return _read_kept(name, trust_remote_code, is_here, digest.hexdigest()[:24])


def has_vocabulary(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in VOCABULARIES)


@lru_cache(8)
def _read_kept(name: str, trust_remote_code: bool, is_here: bool, digest: str) -> OpenedTokenizer:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trireme" / "tokenizers"
    file = cache / f"{digest}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=OpenedTokenizer)
    except (OSError, msgspec.MsgspecError):
        found = _ask_transformers(name, trust_remote_code, is_here)
    try:
        # Renamed into place, as several processes may ask for one tokenizer at a time.
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as partial:
            partial.write(found)
        os.replace(partial.name, file)
    except OSError:  # the cache is not writable: transformers is asked again next time
        pass
    return msgspec.json.decode(found, type=OpenedTokenizer)


def _ask_transformers(name: str, trust_remote_code: bool, is_here: bool) -> bytes:
    """Raises: ConfigError with transformers' words."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "opened.json"
        options = ["--trust"] if trust_remote_code else []

        # -P keeps modules of the current folder from being imported. A folder on this disk needs no network.
        command = [sys.executable, "-P", "-m", DESCRIBER, name, str(file), *options]
        environment = os.environ | ({"HF_HUB_OFFLINE": "1"} if is_here else {})
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, errors="replace", env=environment, timeout=TIMEOUT_S
            )
            if ended.returncode == 0:
                return file.read_bytes()
            # The last line of a traceback is the error itself.
            words = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            words = str(error)

    consent = "" if trust_remote_code else ", or, where it runs code of its own, set `model.trust_remote_code = true`"
    raise ConfigError(
        f"Could not load the tokenizer {name!r}: {words} - expected a folder that AutoTokenizer of transformers opens, "
        "in its fast form (tokenizer.json). Save it with `AutoTokenizer.from_pretrained(...).save_pretrained(folder)`"
        f"{consent}."
    )


def template_problem(opened: OpenedTokenizer, folder: Path) -> str | None:
    """Return why conversations cannot be rendered; None if they can."""
    if not opened.templates.get("default"):
        named = f" named default, but {', '.join(opened.templates)}" if opened.templates else ""
        return (
            f"The tokenizer in {folder} has no chat template{named} - one was expected in chat_template.jinja or "
            "tokenizer_config.json. Take an instruction-tuned model, or add a template to the folder."
        )
    return opened.refusal and (
        f"The chat template in {folder} cannot be rendered: {opened.refusal} - expected each special token that it "
        "uses in special_tokens_map.json or tokenizer_config.json. Add the token there, as the model was trained."
    )


def room_problem(opened: OpenedTokenizer, rows: int, name: str) -> str | None:
    """Return that a model with this many rows in its embedding lacks some for its tokenizer; None if it does not.

    Tokens that stand for pictures or sounds are let through: text models that share a tokenizer with models that see
    (Gemma 3 1B) have none for them.
    """
    foreign = {token for key, token in opened.special_tokens.items() if OF_SENSES.search(key)}
    beyond = [(id, token) for token, id in opened.highest if id >= rows and token not in foreign]
    if not beyond:
        return None
    return (
        f"The tokenizer of {name} has tokens up to {beyond[0][0]} ({beyond[0][1]!r}), and the model has {rows} rows in "
        "its embedding - expected a row for each token. Take the tokenizer that came with the model; or, where these "
        "tokens were added to it, the model that was given rows for them (`resize_token_embeddings`)."
    )


def rowless_token(ids: Sequence[int], rows: int | None, text_of: Callable[[int], str | None]) -> str | None:
    """Return which of a text's tokens the model has no row for; None if it has one for each."""
    if rows is None or max(ids, default=0) < rows:
        return None
    place = next(place for place, id in enumerate(ids) if id >= rows)
    return (
        f"the text has token {ids[place]} ({text_of(ids[place])!r}) at place {place} of {len(ids)}, and the model has "
        f"{rows} rows in its embedding - expected lower ones. Leave it out of the text, or take the tokenizer that "
        "came with the model."
    )


def stop_ids(
    engine_eos: int | None, generation: dict[str, Any], model: dict[str, Any], more: Iterable[int]
) -> set[int]:
    """Return the tokens at which an engine ends a turn.

    Args:
        generation, model: generation_config.json, and config.json, which counts if the former is missing.
        more: `stop_token_ids` of a request.
    """
    described = generation or model | (model.get("text_config") or {})
    eos = described.get("eos_token_id")
    own = eos if isinstance(eos, list) else [eos]
    return {id for id in (engine_eos, *own, *more) if isinstance(id, int)}


def turn_end_warning(opened: OpenedTokenizer, stops: set[int], key: str) -> str | None:
    """Return that a turn's end in the template does not stop the engine; None if it does, or there is no such token."""
    if opened.turn_end is None or opened.turn_end[1] in stops:
        return None
    token, id = opened.turn_end
    return (
        f"the chat template ends a turn of the assistant with {token} (id {id}), and the engine stops at "
        f"{' and '.join(f'id {each}' for each in sorted(stops)) or 'no token'} only, so that turns run on to "
        f"`max_tokens` - expected {id} among them. Correct `eos_token_id` in the model's generation_config.json, or "
        f"set `{key}.extra_body = {{ stop_token_ids = [{id}] }}`."
    )
