"""A model's files: all there, whole, and such that trainer and engine can load them. Headers are read, not weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trireme.config.model_folder import check_model, looks_local
from trireme.config.run import RunConfig
from trireme.tools.doctor.finding import Case, Finding, of, ok, problem, told, warning

INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs"
LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it
AGAIN = "Fetch or write it again: `hf download NAME --local-dir FOLDER`, or the checkpoint's export."
HUB_S = 10.0


def model(case: Case) -> Iterator[Finding]:
    for name in names_of(case.config):
        yield of(_of_name(name), name)


def names_of(config: RunConfig) -> list[str]:
    return [name for name in dict.fromkeys((config.trainer.model.name, config.inference.model.name)) if name]


def _of_name(name: str) -> Finding:
    if looks_local(name):
        missing = next(check_model("model.name", name), None)
        return told(missing) if missing else of_folder(Path(name))
    folder = _in_hubs_cache(name)
    return of_folder(folder) if folder is not None and _is_whole(folder) else _at_hub(name, folder)


def of_folder(folder: Path) -> Finding:
    """A folder with a config.json, as Hugging Face writes it."""
    try:
        config = json.loads((folder / "config.json").read_text())
        files = _weight_files(folder)
        headers = {file: read_header(file) for file in files}
    except (OSError, ValueError, Damaged) as error:
        return problem(f"{error} - expected a model as Hugging Face writes it", AGAIN)
    if "architectures" not in config:
        return problem(
            f'{folder / "config.json"} names no "architectures" - expected ["Qwen3ForCausalLM"] or the like',
            "Add the line, as `save_pretrained` of such a model writes it.",
        )
    size = sum(file.stat().st_size for file in files)
    tensors = sum(len(header) for header in headers.values())
    return ok(
        f"{config['architectures'][0]}, {tensors} tensors in {len(files)} file{'s' if len(files) > 1 else ''}, "
        f"{size / 1e6:,.1f} MB, all whole",
        bytes=size,
        tensors=tensors,
    )


class Damaged(Exception):
    """A file is not what its own header, or the index, says."""


def _weight_files(folder: Path) -> list[Path]:
    """Raises: Damaged where one is missing."""
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            others = ", ".join(sorted(file.name for file in folder.glob("*.bin"))[:3])
            raise Damaged(f"{folder} has no *.safetensors" + (f" but {others}" if others else ""))
        return files
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = [folder / name for name in sorted(set(places.values()))]
    if missing := [file.name for file in files if not file.exists()]:
        raise Damaged(f"{folder} lacks {', '.join(missing[:3])} ({len(missing)} of the {len(files)} files of {INDEX})")
    held = {tensor for file in files for tensor in read_header(file)}
    if lost := sorted(places.keys() - held):
        raise Damaged(f"{index} names {lost[0]} and {len(lost) - 1} more tensors that are in none of its files")
    return files


def read_header(file: Path) -> dict[str, Any]:
    """What a safetensors file says it holds.

    Raises: Damaged where it is something else, or ends too early.
    """
    size = file.stat().st_size
    with open(file, "rb") as opened:
        first = opened.read(len(POINTER))
        if first.startswith(POINTER):
            raise Damaged(f"{file} is a pointer of Git LFS, not the file itself (`git lfs pull` fetches it)")
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or length > min(size, LONGEST_HEADER):
            raise Damaged(f"{file} is no safetensors file, or ends within its header ({size:,} bytes)")
        opened.seek(8)
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
        except ValueError as error:
            raise Damaged(f"{file} has a header that cannot be read ({error})") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != end:
        raise Damaged(f"{file} has {size:,} bytes, and its header says {end:,}")
    return header


# of a hub


def _in_hubs_cache(name: str) -> Path | None:
    """Its folder there, which may hold a part of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / "config.json").exists() and bool(_weight_files(folder))
    except (Damaged, OSError, ValueError):
        return False


def _at_hub(name: str, folder: Path | None) -> Finding:
    """Of a model that is yet to be fetched, by whoever loads it first."""
    here = "only a part of it is on this disk" if folder else "it is not on this disk"
    fetch = f"`hf download {name}` fetches it now, with `HF_TOKEN` set where the model wants one."
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return problem(f"{here}, and HF_HUB_OFFLINE is set - expected the whole model", f"Unset it, or: {fetch}")
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(name, timeout=HUB_S, files_metadata=True)
    except Exception as error:  # of the hub's library, of httpx under it, or of a proxy: in its own words
        words = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return problem(
            f"{here}, and the hub does not give it: {type(error).__name__}: {words} - expected one of them", fetch
        )
    size = sum(each.size or 0 for each in found.siblings or () if each.rfilename.endswith(".safetensors"))
    if not size:
        return problem(f"{here}, and has no *.safetensors on the hub - expected a model in this form", AGAIN)
    return warning(f"{here}: {size / 1e9:.3g} GB are fetched when the run starts - expected them to be there", fetch)
