"""`[inference.args]` of `vf-rl`: flags of vLLM, those that are keys of ours and those that are handed on."""

from __future__ import annotations

from typing import Any

from trireme.config.files import toml_value
from trireme.config.orchestrator import OrchestratorConfig
from trireme.tools.formats.translation import Reader, Sheet
from trireme.tools.formats.vf_rl_file import VfArgs, VfRl

OURS = {
    "dtype": "inference.model.dtype",
    "max_model_len": "inference.model.max_model_len",
    "enforce_eager": "inference.model.enforce_eager",
    "enable_auto_tool_choice": "inference.model.enable_auto_tool_choice",
    "tool_call_parser": "inference.model.tool_call_parser",
    "reasoning_parser": "inference.model.reasoning_parser",
    "trust_remote_code": "inference.model.trust_remote_code",
    "tensor_parallel_size": "inference.parallel.tp",
    "data_parallel_size": "inference.parallel.dp",
    "gpu_memory_utilization": "inference.gpu_memory_utilization",
    "max_num_seqs": "inference.max_num_seqs",
    "host": "inference.server.host",
}
"""Flags of vLLM that have a key here."""

NEEDLESS = {
    "disable_log_requests": "requests are not logged anyway",
    "enable_log_requests": "the orchestrator's journal has every rollout",
}
"""Flags that change nothing here."""


def put_engine(sheet: Sheet, file: VfRl, args: Reader) -> None:
    flags = {name.replace("-", "_"): value for name, value in file.inference.args.items()}
    _put_port(sheet, flags, args, file.trainer.args)
    if file.trainer.args.vllm_server_host and "host" not in flags:
        args.take("vllm_server_host", "inference.server.host")
    _put_timeout(args, file.trainer.args)
    if (model := flags.pop("model", file.model)) != file.model:
        sheet.refuse(
            f"`inference.args.model = {toml_value(model)}`, `model = {toml_value(file.model)}` - expected one model: "
            "vLLM starts from what is trained. Remove `inference.args.model`."
        )
    for name, value in flags.items():
        _put_flag(sheet, name, value)


def _put_flag(sheet: Sheet, name: str, value: Any) -> None:
    theirs, said = f"inference.args.{name}", f" = {toml_value(value)}"
    if name in NEEDLESS:
        sheet.note(f"{theirs}{said}: not needed here, {NEEDLESS[name]}")
    elif name in OURS:
        sheet.put(OURS[name], value, theirs=theirs, said=said)
    else:
        sheet.put(f"inference.args.{name}", value, theirs=theirs, said=said, why="handed on to vLLM")


def _put_port(sheet: Sheet, flags: dict[str, Any], args: Reader, given: VfArgs) -> None:
    """Where the server listens is where it is looked for."""
    port = flags.pop("port", None)
    if port is None:
        args.take("vllm_server_port", "inference.server.port")
    elif args.given("vllm_server_port") and port != given.vllm_server_port:
        args.refuse("vllm_server_port", f"`inference.args.port = {port}` says another one. Remove one of the two.")
    else:
        sheet.put("inference.server.port", port, theirs="inference.args.port", said=f" = {port}")


def _put_timeout(args: Reader, given: VfArgs) -> None:
    """The orchestrator waits for the server, too, and never less than by itself."""
    args.take("vllm_server_timeout", "inference.start_timeout_s")
    if given.vllm_server_timeout > OrchestratorConfig().engine_timeout_s:
        args.take("vllm_server_timeout", "orchestrator.engine_timeout_s")
