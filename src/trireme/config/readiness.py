"""What must be true of this machine, now, for a run to start: its models and files are there, its ports are free."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from trireme.base.devices import Devices
from trireme.base.processes import port_is_free
from trireme.config.orchestrator import Environment
from trireme.config.run import RunConfig

# Folders whose content is ours, never an owner on a hub.
_LOCAL_FOLDERS = ("models", "outputs", "checkpoints", "weights")


def trainer_model_exists(config: RunConfig, _: Devices) -> Iterator[str]:
    yield from check_model("trainer.model.name", config.trainer.model.name)
    if config.trainer.tokenizer.name != config.trainer.model.name:
        yield from check_model("trainer.tokenizer.name", config.trainer.tokenizer.name, holds="tokenizer_config.json")


def engines_model_exists(config: RunConfig, _: Devices) -> Iterator[str]:
    yield from check_model("inference.model.name", config.inference.model.name)
    yield from _check_architecture(config.inference.model.name)


def _check_architecture(name: str | None) -> Iterator[str]:
    """Without it vLLM guesses, and may serve the model as an embedding model whose weights cannot be updated."""
    file = Path(name or "") / "config.json"
    if name and looks_local(name) and file.exists() and "architectures" not in json.loads(file.read_text()):
        yield (
            f'{file} names no "architectures" - expected ["Qwen3ForCausalLM"] or the like, as `save_pretrained` of a '
            "model writes it. Add the line."
        )


def engines_other_model_exists(config: RunConfig, devices: Devices) -> Iterator[str]:
    """Where it is the trainer's too, that was said already."""
    if config.inference.model.name != config.trainer.model.name:
        yield from engines_model_exists(config, devices)


def check_model(key: str, name: str | None, *, holds: str = "config.json") -> Iterator[str]:
    """Names on a hub are left to the loading process: only it can know."""
    if name is None or not looks_local(name) or (Path(name) / holds).exists():
        return
    if (Path(name) / "adapter_config.json").exists():
        yield (
            f'{key} = "{name}": this folder holds adapters, not a model - expected a model as Hugging Face writes it. '
            "Add them to their base model first (`trireme export RUN --merge --to FOLDER`), and start from that."
        )
        return
    what = f"has no {holds}" if Path(name).is_dir() else "does not exist"
    yield (
        f'{key} = "{name}": this folder {what} (looked in {Path.cwd()}) - expected a model as Hugging Face writes it. '
        f"{_models_nearby(Path(name))}"
    )


def looks_local(name: str) -> bool:
    """Whether a model's name means a folder. `owner/model` is a hub's, unless a folder `owner` is here.

    Example:
        looks_local("./tiny"), looks_local("models/tiny"), looks_local("Qwen/Qwen3-0.6B")  # True, True, False
    """
    first, _, rest = name.partition("/")
    if name.startswith((".", "/", "~")) or rest.count("/") > 0 or Path(name).is_dir():
        return True
    return bool(rest) and (first in _LOCAL_FOLDERS or Path(first).is_dir())


def config_file(name: str) -> Path | None:
    """A model's `config.json`, in its folder or among what was downloaded; None where there is none yet."""
    local = Path(name) / "config.json"
    if local.exists():
        return local
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a folder that is not there
        return None
    return Path(found) if isinstance(found, str) else None


def _models_nearby(missing: Path) -> str:
    folder = next((parent for parent in missing.parents if parent.is_dir()), Path("."))
    found = sorted(str(file.parent) for file in folder.glob("*/config.json"))[:5]
    return f"Found nearby: {', '.join(found)}." if found else "Check the name, or make or download the model first."


def environment_files_exist(config: RunConfig, _: Devices) -> Iterator[str]:
    evaluation = config.orchestrator.eval
    environments: tuple[Environment, ...] = config.orchestrator.env + (evaluation.env if evaluation else ())
    for file in sorted({environment.id for environment in environments if environment.id.endswith(".py")}):
        if not Path(file).is_file():
            yield (
                f'environment id = "{file}": there is no such file (looked in {Path.cwd()}) - expected a Python file '
                "with `load_environment`. Check the path."
            )


def port_rule(key: str) -> Callable[[RunConfig, Devices], Iterator[str]]:
    def rule(config: RunConfig, _: Devices) -> Iterator[str]:
        for name, host, port in ports(config):
            if name == key and port and _is_ours(host) and not port_is_free(port, host):
                yield (
                    f"port {port} on {host} is in use, wanted for {_OWNERS[key]} ({key}) - expected a free one. "
                    f"`lsof -i :{port}` shows who has it; or take another: "
                    f"`--{key.replace('_', '-')} {_next_free_port(port, host)}`."
                )

    return rule


_OWNERS = {
    "inference.server.port": "the inference server",
    "orchestrator.server.port": "the orchestrator's status server",
    "ports.batches": "batches from the orchestrator to the trainer",
    "ports.weights": "the meeting of trainer and engines",
    "ports.ranks": "the meeting of the trainer's ranks",
}


def _is_ours(host: str) -> bool:
    """Whether the address belongs to this machine; another machine's ports cannot be looked at."""
    return port_is_free(0, host)


def _next_free_port(port: int, host: str) -> int:
    return next((number for number in range(port + 1, min(port + 50, 65536)) if port_is_free(number, host)), 0)


def ports(config: RunConfig) -> list[tuple[str, str, int]]:
    """Key, address and number of each port that is known."""
    known = (
        ("inference.server.port", config.inference.server.host, config.inference.server.port),
        ("orchestrator.server.port", config.orchestrator.server.host, config.orchestrator.server.port),
        ("ports.batches", config.hosts.orchestrator, config.ports.batches),
        ("ports.weights", _first(config.hosts.trainer), config.ports.weights),
        ("ports.ranks", _first(config.hosts.trainer), config.ports.ranks if len(config.hosts.trainer) > 1 else None),
    )
    return [(key, host, port) for key, host, port in known if port is not None]


def _first(addresses: tuple[str, ...]) -> str:
    return addresses[0] if addresses else ""
