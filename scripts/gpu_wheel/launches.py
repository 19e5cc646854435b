"""Every run file below `configs/` on pretended GPUs: our command line, vLLM's parser, vLLM's own configuration.

Each row is a child of this process, forked after vLLM was imported, because vLLM reads its settings from the
environment when it builds its configuration. Prints rows for the compute capability in PRETENDED_CAPABILITY.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from rows import Row, failure

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.compatibility import kind_of
from trireme.config.files import read_table
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules.check import check, check_launch
from trireme.config.run import RunConfig
from trireme.inference.server import environment, server_arguments, without_negated_switches
from trireme.launch.plan import plan
from trireme.tools.formats.run_file import FORMATS, read_run_file, resolve_run
from trireme.tools.workspace import SIZES, sized

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CAPABILITY = os.environ["PRETENDED_CAPABILITY"]
COUNTS = (1, 2, 4, 8)
CORES = 64
DEADLINE_S = 600

QUICKSTART = "configs/reverse-text/rl.toml"
PUBLISHED = ("--model.name", "Qwen/Qwen3-0.6B")
EXPERTS = ("--model.name", "Qwen/Qwen3-30B-A3B")
FLAGS: dict[str, tuple[str, ...]] = {
    "tensor parallelism of 2": (*PUBLISHED, "--inference.parallel.tp", "2"),
    "synchronous": (*PUBLISHED, "--max-async-level", "0"),
    "adapters": (*PUBLISHED, "--trainer.model.lora.rank", "16", "--trainer.model.lora.sync", "adapter"),
    "weights in 8 bits": (*PUBLISHED, "--inference.args.quantization", "fp8_per_block"),
    "cache in 8 bits": (*PUBLISHED, "--inference.args.kv-cache-dtype", "fp8"),
    "cut sampler": (*PUBLISHED, "--orchestrator.sampling.top-p", "0.9"),
    "parsers": ("--inference.model.tool-call-parser", "hermes", "--inference.model.reasoning-parser", "minimax_m2"),
    "experts": EXPERTS,
    "routes of experts": (*EXPERTS, "--trainer.model.moe.router-replay"),
    "latent attention": ("--model.name", "deepseek-ai/DeepSeek-V3"),
    "sinks": ("--model.name", "openai/gpt-oss-20b"),
}
"""What no file below `configs/` has: flags of the quickstart."""


class Launch(NamedTuple):
    """A server that one or more rows start."""

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


def main() -> None:
    servers: dict[Launch, list[Row]] = {}
    for row, launch in launches():
        if launch is None:
            row.print()
        else:
            servers.setdefault(launch, []).append(row)
    import_vllm(next(iter(servers)))
    for launch, rows in servers.items():
        print(rows[0].what, file=sys.stderr, flush=True)
        error, choices = in_child(launch)
        for row in rows:
            row._replace(state="failed" if error else "ok", why=error).print()
        for row in choices:
            row.print()


def launches() -> Iterator[tuple[Row, Launch | None]]:
    """Yield what is launched, or the row of a refusal."""
    with TemporaryDirectory() as folder:
        for file in sorted(Path("configs").rglob("*.toml")):
            text = file.read_text()
            for size in SIZES:
                if size != "cpu" and sized(text, size) == sized(text, "cpu"):
                    continue
                copy = Path(folder) / size / file
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(sized(text, size))
                for count in COUNTS if is_run(copy) else ():
                    yield launch_of(f"{file}{'' if size == 'cpu' else f', {size}'}", str(copy), (), count)
    for name, flags in FLAGS.items():
        for count in COUNTS:
            yield launch_of(f"quickstart, {name}", QUICKSTART, flags, count)


def is_run(file: Path) -> bool:
    """Return whether a file starts an engine: those of `gepa` and `sft` do not."""
    table = read_table(file)
    return kind_of(table) != "gepa" and "data" not in table


def launch_of(what: str, file: str, flags: tuple[str, ...], count: int) -> tuple[Row, Launch | None]:
    row = Row("ok", what, gpus=count, capability=CAPABILITY)
    try:
        config, devices = resolved(file, flags, count)
        check_launch(config, devices)
    except ConfigError as error:
        return row._replace(state="refused", why=str(error)), None
    (server,) = (each for each in plan(config, Path("run.json"), devices).values() if each.name == "inference")
    ports = {str(config.inference.server.port): "8000"}  # a free one each time
    arguments = tuple(ports.get(word, word) for word in server_arguments(config))
    return row, Launch(arguments, tuple({**server.env, **environment(config)}.items()))


def resolved(file: str, flags: tuple[str, ...], count: int) -> tuple[RunConfig, Devices]:
    """Return a run as its command resolves it on so many GPUs."""
    major, minor = map(int, CAPABILITY.split("."))
    devices = Devices(gpus=tuple(map(str, range(count))), cores=CORES, capabilities=((major, minor),) * count)
    if (kind := kind_of(read_table(Path(file)))) in FORMATS:
        return resolve_run(read_run_file([file, *flags], devices, program=kind, kinds=(kind,)), devices), devices
    config, _ = load_run_config(["@", file, *flags], program="rl")
    config = resolve(config, devices)
    check(config, devices)
    return config, devices


def import_vllm(any_launch: Launch) -> None:
    """Import all that children need, by a launch of this process's own: it takes seconds."""
    import vllm.triton_utils

    assert vllm.triton_utils.HAS_TRITON, "vLLM finds no triton, without which it would choose other code"
    configure(any_launch)


def in_child(launch: Launch) -> tuple[str, list[Row]]:
    """Return the error of a launch, or nothing, and rows for what vLLM chooses."""
    context = get_context("fork")
    answer, end = context.Pipe(duplex=False)
    child = context.Process(target=lambda: end.send(configure(launch)))
    child.start()
    end.close()
    try:
        return answer.recv() if answer.poll(DEADLINE_S) else (f"no answer within {DEADLINE_S} s", [])
    except EOFError:
        child.join()
        return f"vLLM ended the process (exit code {child.exitcode})", []
    finally:
        child.kill()


def configure(launch: Launch) -> tuple[str, list[Row]]:
    os.environ.update(launch.environment)
    os.environ["PRETENDED_GPUS"] = os.environ["CUDA_VISIBLE_DEVICES"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else vLLM wants to see triton's driver, here and where it inspects models
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            parser = make_arg_parser(FlexibleArgumentParser())
            args = parser.parse_args(without_negated_switches([*launch.arguments], parser._option_string_actions))
            validate_parsed_serve_args(args)
        engine = AsyncEngineArgs.from_cli_args(args)
        config = engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except SystemExit:
        return printed.getvalue().strip().splitlines()[-1], []
    except Exception as error:
        return f"{type(error).__name__}: {error} ({' '.join(launch.arguments)})", []
    return "", [attention_of(args.model, config), runner_of(config)]


def attention_of(name: str, config: VllmConfig) -> Row:
    """Return the attention backend that vLLM chooses for a configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model, cache = config.model_config, config.cache_config.cache_dtype
    dtype = str(model.dtype).removeprefix("torch.")
    invariant = ", batch-invariant" if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else ""
    row = Row("ok", f"attention of {name} in {dtype}, cache {cache}{invariant}", capability=CAPABILITY)
    has_sink, num_heads = model.hf_config.model_type == "gpt_oss", model.get_num_attention_heads(config.parallel_config)
    try:
        with set_current_vllm_config(config):
            backend = get_attn_backend(
                model.get_head_size(), model.dtype, cache, use_mla=model.use_mla, num_heads=num_heads, has_sink=has_sink
            )
    except Exception as error:
        return failure(row, error)
    return row._replace(why=backend.get_name())


def runner_of(config: VllmConfig) -> Row:
    return Row("ok", "model runner", "V2" if config.use_v2_model_runner else "V1", capability=CAPABILITY)


if __name__ == "__main__":
    main()
