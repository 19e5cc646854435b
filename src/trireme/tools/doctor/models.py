"""Checks of the model's files and its tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.config.model.folder import check_model, config_file, looks_local
from trireme.config.model.tokenizer import room_problem
from trireme.config.model.weights import INDEX, QUICK_BYTES, find_weights, read_tensors, weights_problems
from trireme.config.rules.check import launch_warnings
from trireme.orchestrator.rollout.chat import ChatTokenizer, open_chat_tokenizer
from trireme.tools.doctor.finding import Case, Finding, about, from_error, ok, problem, warning

AGAIN = "Fetch or write it again: `hf download NAME --local-dir FOLDER`, or the checkpoint's export."
HUB_S = 10.0
TEXT = "Row 12 oars; then rest."


def model(case: Case) -> Iterator[Finding]:
    for name in dict.fromkeys((case.config.trainer.model.name, case.config.inference.model.name)):
        if name:
            yield about(name, _check_name(name))


def _check_name(name: str) -> Finding:
    if looks_local(name):
        missing = next(check_model("model.name", name), None)
        return from_error(missing) if missing else check_folder(Path(name))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = check_folder(Path(snapshot_download(name, local_files_only=True)))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return _check_hub(name, "it is not on this disk")
    return found if found.verdict == "ok" else _check_hub(name, "only a part of it is on this disk")


def check_folder(folder: Path) -> Finding:
    """Read the headers of all weight files, which say how long each file must be, and compare them with the index. The
    values of a small model are looked at too."""
    file, index = folder / "config.json", folder / INDEX
    try:
        kind = json.loads(file.read_text())["architectures"][0]
        places = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        files, tensors = find_weights(folder), read_tensors(folder)
    except ConfigError as error:
        return from_error(str(error))
    except (OSError, ValueError, KeyError) as error:
        said = f"{file} cannot be read ({error}), so it is missing, cut off or a pointer of Git LFS"
        return problem(f"{said} - expected a model as Hugging Face writes it", AGAIN)
    # an index that names more tensors than the files have is usually a download that was cut off
    if lost := sorted(places.keys() - tensors.keys()):
        return problem(f"{index} names {lost[0]}, which is in none of its files - expected all tensors", AGAIN)
    if not files:
        return problem(f"{folder} has no *.safetensors - expected a model in this form", AGAIN)
    if found := next(weights_problems(folder), None):
        return from_error(found)

    size = sum(each.stat().st_size for each in files)
    said = f"{kind}, {len(tensors)} tensors in {len(files)} files, {size / 1e6:,.1f} MB"
    return ok(said, bytes=size, tensors=len(tensors))


def weights(case: Case) -> Iterator[Finding]:
    """Read the weights of a model that is large and on this disk, and look for values that are not finite."""
    name = case.config.trainer.model.name
    if name and (file := config_file(name)) is not None and not case.config.trainer.model.from_scratch:
        with suppress(ConfigError):  # the check of the model reports it
            if sum(each.stat().st_size for each in find_weights(file.parent)) > QUICK_BYTES:
                found = next(weights_problems(file.parent, most_bytes=None), None)
                yield about(name, from_error(found) if found else ok("all values are finite"))


def _check_hub(name: str, here: str) -> Finding:
    """Check a model that the first process to load it has yet to fetch."""
    fetch = f"`hf download {name}` fetches it now, with `HF_TOKEN` set where the model wants one."
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return problem(f"{here}, and HF_HUB_OFFLINE is set - expected the whole model", f"Unset it, or: {fetch}")
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(name, timeout=HUB_S, files_metadata=True).siblings or []
    except Exception as error:  # an error of the hub's library, of httpx under it, or of a proxy
        said = f"{here}, and cannot be fetched: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return problem(f"{said} - expected one of them", fetch)

    size = sum(each.size or 0 for each in files if each.rfilename.endswith(".safetensors"))
    if not size:
        return problem(f"{here}, and has no *.safetensors on the hub - expected a model in this form", AGAIN)
    return warning(f"{here}: {size / 1e9:.3g} GB are fetched when the run starts - expected them to be there", fetch)


def tokenizer(case: Case) -> Iterator[Finding]:
    """Check the tokenizers of engine and trainer with the orchestrator's own reader of them."""
    names = {case.config.inference.model.name, case.config.trainer.tokenizer.name}
    trusts = case.config.trainer.model.trust_remote_code
    for name in sorted(name for name in names if name):
        try:
            yield about(name, _check_tokenizer(open_chat_tokenizer(name, trust_remote_code=trusts), name))
        except ConfigError as error:
            yield from_error(str(error))
        except Exception as error:  # a template is a program, and may raise anything
            said = f"{name}: its chat template cannot render a question ({error}) - expected a prompt"
            yield problem(said, "Look at chat_template.jinja in the model's folder.")
    for message in launch_warnings(case.config):
        what, _, fix = message.rpartition(". ")
        yield warning(what, fix)


def _check_tokenizer(opened: ChatTokenizer, name: str) -> Finding:
    """Send a question through the chat template and the tokenizer, and back."""
    if opened.vocab_size and (found := room_problem(opened.opened, opened.vocab_size, name)):
        return from_error(found)
    messages = [{"role": "user", "content": TEXT}]
    prompt = opened.render(messages, tools=None, generate=True)
    ids = opened.encode(prompt)
    said = f"{opened.num_tokens:,} tokens; a question of {len(TEXT)} characters becomes {len(ids)} tokens"

    if TEXT not in prompt:
        said += ", and the chat template leaves the question out - expected it in the prompt"
        return problem(said, "Look at chat_template.jinja in the model's folder.")
    # without its mark, the model would have to open the assistant's turn itself
    if prompt == opened.render(messages, tools=None, generate=False):
        said += "; the chat template does not say where the assistant begins (`add_generation_prompt`)"
        return warning(said, "Take a template that does, or the model has to learn it from reward alone.")
    # Jinja renders unknown names as nothing
    if undefined := opened.opened.undefined:
        said += f"; the chat template uses {', '.join(undefined)}, and nothing defines it, so nothing stands there"
        return warning(said, "Fine where the model was trained so; else add it to special_tokens_map.json.")
    # a tokenizer that loses text would train on other text than the engine read
    if opened.decode(ids, keep_special=True) != prompt:
        said += ", which stand for another text - expected the same: some characters are not in its vocabulary"
        return warning(said, "Fine for a tiny model; otherwise take the tokenizer that came with the model.")
    return ok(f"{said} and back")
