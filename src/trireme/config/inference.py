"""`[inference]`: the vLLM servers, and the names that vLLM knows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.config.section import EnvVars, Section

KeepPrefixCache = Literal["never", "running", "always"]


class InferenceModel(Section):
    """`[inference.model]`: the model as it is served; names are vLLM's."""

    name: str | None = None
    """Folder or hub name of the model; the run's `model.name` if not set."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Precision of the engine; `auto` is float32 on CPU and bfloat16 on GPUs, or float16 where they have none."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus completion in tokens; `seq_len` if not set, and never above it."""
    enforce_eager: bool = False
    """No CUDA graphs, no compilation; always so on CPU."""
    enable_auto_tool_choice: bool = False
    """Let the model decide when to call a tool; follows from `tool_call_parser`."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls: "hermes", "qwen3_coder", "llama3_json", …; the hermes form is read if not set."""
    reasoning_parser: str | None = None
    """vLLM's parser that separates thinking from content: "qwen3", "deepseek_r1", …; thinking is content if not set."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class Parallel(Section):
    """`[inference.parallel]`: GPUs of one server."""

    tp: PositiveInt = 1
    """Tensor parallelism."""
    dp: PositiveInt | None = None
    """Data parallelism; as many as the GPUs allow if not set."""


class InferenceServer(Section):
    """`[inference.server]`: where it listens."""

    host: str = "127.0.0.1"
    """Address to bind; loopback if not set."""
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port; `rl` finds a free one if not set, `inference` alone takes 8000."""


class CpuEngine(Section):
    """`[inference.cpu]`: an engine on a machine without a GPU."""

    kv_cache_gib: PositiveInt = 1
    """Most memory for keys and values; a small model takes what its sequences need."""
    threads: PositiveInt | None = None
    """OpenMP threads of all workers; half of the machine's cores if not set, all of them in a synchronous run."""


class InferenceConfig(Section):
    """`[inference]`."""

    model: InferenceModel = InferenceModel()
    parallel: Parallel = Parallel()
    server: InferenceServer = InferenceServer()
    cpu: CpuEngine = CpuEngine()
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory that the engine may take; 0.4 if not set on the trainer's GPU, which gets the rest."""
    max_num_seqs: PositiveInt = 256
    """Most requests that the engine runs at once; more wait in its queue."""
    keep_prefix_cache: KeepPrefixCache = "never"
    """Caches that outlive an update: none, those of requests under way, or those that later turns read too."""
    args: dict[str, Any] = {}
    """More arguments of vLLM's server, by its own names. A list is several values, a table JSON, false `--no-NAME`."""
    start_timeout_s: PositiveFloat = 900.0
    """Longest time that the engine may take to start."""
    drain_timeout_s: PositiveFloat = 20.0
    """Longest time that an engine which joined finishes requests after SIGTERM; then other engines get them."""
    env_vars: EnvVars = {}
    """Environment variables of the engine, over the run's `env_vars`."""

    def arg(self, name: str) -> Any:
        """Return an argument of vLLM's server that the user set, by its name with dashes; None if not set."""
        return next((value for key, value in self.args.items() if key.replace("_", "-") == name), None)

    @property
    def gpu_share(self) -> float:
        """Return the share of each GPU's memory that the engine takes."""
        return float(self.arg("gpu-memory-utilization") or self.gpu_memory_utilization)


LOW_BIT = dict.fromkeys(("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8"), 2.0**-4)
"""Values of vLLM's argument `quantization` with which an engine rounds plain weights itself, at each update too, and
the largest relative error of a value that is rounded so. The inputs of these layers are rounded in the same way."""


def low_bit_error(inference: InferenceConfig) -> float:
    """Return the largest relative error of a layer's output if the engine holds its weights in few bits, else 0."""
    return math.sqrt(2) * LOW_BIT.get(str(inference.args.get("quantization")), 0.0)


_REGISTERED = {
    "tool_call_parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
}


@cache
def parser_names(kind: str) -> tuple[str, ...]:
    """Return the names of `tool_call_parser` or `reasoning_parser`; none without a vLLM that lists them."""
    file, table = _REGISTERED[kind]
    listed = _source_of_vllm(file).partition(f"\n{table} = {{")[2].partition("\n}")[0]
    return tuple(re.findall(r'^    "(.+?)": ', listed, re.MULTILINE))


@cache
def sampling_names() -> tuple[str, ...]:
    """Return the fields of vLLM's SamplingParams; none if vLLM is not installed."""
    fields = _source_of_vllm("sampling_params.py").partition("\nclass SamplingParams(")[2].partition("\n    def ")[0]
    return tuple(re.findall(r"^    ([a-z]\w*): ", fields, re.MULTILINE))


def _source_of_vllm(file: str) -> str:
    # Read, not imported: importing vLLM takes seconds.
    spec = find_spec("vllm")
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    return path.read_text(encoding="utf-8") if path and path.exists() else ""


# Rules of these tables. Each yields one message per problem.

_NOT_ARGUMENTS = {
    "host": "Set `inference.server.host`.",
    "port": "Set `inference.server.port`.",
    "api-key": "Set TRIREME_TOKEN in the environment: clients send it as they would send the key.",
    "uds": "Set `inference.server.host` and `inference.server.port`.",
    "root-path": "Remove it.",
    "middleware": "Remove it.",
    "config": "Write its lines into `[inference.args]`.",
}
"""Arguments of vLLM's server that are refused in `[inference.args]`, with what to do instead."""


def inference_problems(config: InferenceConfig) -> Iterator[str]:
    """Yield what vLLM would refuse when it starts, and arguments that would open its server to others."""
    model = config.model
    arguments = {name.replace("_", "-"): value for name, value in config.args.items()}

    # Parsers must be known by name, unless the installed vLLM lists none, or a plugin of the user's may add some.
    for key, plugin in (("tool_call_parser", "tool-parser-plugin"), ("reasoning_parser", "reasoning-parser-plugin")):
        name, known = getattr(model, key), parser_names(key)
        if name is None or name in known or not known or plugin in arguments:
            continue
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        advice = f"Did you mean `{near[0]}`?" if near else "Take one of these, or leave it out."
        yield (
            f'inference.model.{key} = "{name}" - vLLM knows no parser of that name; expected one of '
            f"{', '.join(sorted(known))}. {advice} A parser of your own: `[inference.args]` `{plugin}`."
        )

    if model.enable_auto_tool_choice and not model.tool_call_parser:
        yield (
            "inference.model.enable_auto_tool_choice = true without a `tool_call_parser` - expected both. Name the "
            'form in which this model writes tool calls, for example `tool_call_parser = "hermes"`, or leave both out: '
            "the orchestrator then reads the hermes form."
        )

    for name, value in arguments.items():
        # vLLM's arguments come last and win, so these would bypass the token and the rules about addresses. vLLM also
        # accepts the first letters of a name, and a value after `=`.
        word = name.partition("=")[0]
        full = next((full for full in _NOT_ARGUMENTS if full.startswith(word)), "")
        if full or word.startswith(("ssl-", "allowed-", "allow-c")):
            instead = _NOT_ARGUMENTS.get(full, "Put a proxy in front of it where browsers or other machines need it.")
            yield (
                f"inference.args.{name} = {'…' if 'key' in name else repr(value)} - expected arguments of the engine, "
                f"not of its HTTP server. {instead}"
            )
