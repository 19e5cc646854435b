"""What the inference process tells vLLM: flags and variables that follow from the configuration."""

import ast
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from support.processes.parsing import parse
from support.runs.resolved_runs import CPU, GPUS, prefixed, resolved
from trireme.base.devices import Devices
from trireme.base.token import TOKEN
from trireme.config.inference import parser_names, sampling_names
from trireme.config.run import RunConfig
from trireme.config.trainer import Lora
from trireme.inference.server import FORKED, environment, server_arguments, without_negated_switches

REPLAY = "--trainer.model.moe.router-replay true"
FAST_PATH = "trireme.inference.fast_generate.FastGenerate"
SYNCHRONOUS = "--max-async-level 0"
ADAPTER = prefixed("trainer.model.lora", "--rank 9 --sync adapter")
EXECUTOR = "--distributed-executor-backend"


def arguments(flags: str = "", on: Devices = CPU) -> list[str]:
    return server_arguments(resolved(f"--model.name some/model {flags}", on=on))


def value_of(flag: str, flags: str = "", on: Devices = CPU) -> str | None:
    """Of several of one name, vLLM takes the last."""
    return dict(pairwise(arguments(flags, on))).get(flag)


@pytest.mark.parametrize(
    ("flag", "typed", "on", "expected"),
    [
        ("--block-size", "", CPU, "32"),
        ("--block-size", "--inference.args.block-size 64", CPU, "64"),
        ("--block-size", "--inference.args.kv-cache-dtype fp8", CPU, "32"),
        ("--block-size", "", GPUS, None),
        (EXECUTOR, "", CPU, FORKED),
        (EXECUTOR, "", GPUS, None),
        (EXECUTOR, "--inference.args.tensor-parallel-size 2", CPU, None),
        (EXECUTOR, f"--inference.args.{EXECUTOR[2:]} mp", CPU, "mp"),
        ("--max-logprobs", "", CPU, "88"),
        ("--max-logprobs", "--orchestrator.sampling.top-k 200", CPU, "258"),
        ("--max-lora-rank", ADAPTER, CPU, "16"),
        ("--lora-target-modules", ADAPTER, CPU, "q_proj"),
        # the engine knows last names alone
        ("--lora-target-modules", f"{ADAPTER} --trainer.model.lora.target-modules layers.1.a.o_proj", CPU, "o_proj"),
    ],
)
def test_a_flag_of_vllm_follows_from_the_configuration(flag, typed, on, expected):
    assert value_of(flag, typed, on) == expected


@pytest.mark.parametrize(
    ("flag", "typed", "on"),
    [
        ("--enable-auto-tool-choice", "--inference.model.tool-call-parser hermes", CPU),
        ("--enable-lora", ADAPTER, CPU),
        ("--enable-return-routed-experts", REPLAY, GPUS),
        ("trireme.inference.cpu.expert_routes.RoutingWorker", REPLAY, CPU),
        ("trireme.inference.cpu.expert_routes.RoutingScheduler", REPLAY, CPU),
        ("--no-enable-prefix-caching", SYNCHRONOUS, CPU),
        ("--enable-prefix-caching", f"{SYNCHRONOUS} {REPLAY}", CPU),
    ],
)
def test_vllm_is_told_only_what_the_run_asks_for(flag, typed, on):
    assert flag in arguments(typed, on)
    assert flag not in arguments("--trainer.model.lora.rank 9", on)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--seq-len 130", "5121"),  # 1024 sequences of 5 blocks, and the one that vLLM keeps back
        ("--seq-len 130 --orchestrator.max-concurrent 100", "1281"),  # 256 sequences that the engine runs at once
        ("--seq-len 4096", None),  # 12 GiB would be needed, and 1 is there
        ("--seq-len 4096 --inference.cpu.kv-cache-gib 12", "131073"),
        ("--seq-len 130 --inference.args.num-gpu-blocks-override 7", "7"),
        ("--seq-len 130 --inference.args.block-size 64", None),
    ],
)
def test_cpu_cache_holds_no_more_than_all_sequences(typed, expected):
    found = server_arguments(resolved(f"--model.name models/reverse-text-tiny {typed}"))
    assert dict(pairwise(found)).get("--num-gpu-blocks-override") == expected


def test_values_of_files_are_written_as_vllms_parser_reads_them():
    args = {"async_scheduling": False, "served-model-name": ["a", "b"], "enable-log-deltas": True, "seed": None}
    args |= {"speculative-config": {"method": "ngram"}, "lora-modules": [{"name": "a"}], "enforce-eager": False}
    written = " ".join(server_arguments(RunConfig.model_validate({"inference": {"args": args}})))
    parts = ("--no-async-scheduling", "--served-model-name a b", "--enable-log-deltas", "--no-enforce-eager")
    parts += ('--speculative-config {"method": "ngram"}', '--lora-modules {"name": "a"}')
    assert [part for part in parts if f" {part} --" not in written] == []
    assert "seed" not in written
    # a plain switch is off where it is left out; a name that vLLM does not know is vLLM's to refuse
    known = {"--async-scheduling", "--no-async-scheduling", "--a-switch", "--no-value"}
    given = ["--no-async-scheduling", "--no-a-switch", "--no-value", "--no-such-name"]
    assert without_negated_switches(given, known) == ["--no-async-scheduling", "--no-value", "--no-such-name"]


def test_what_is_wrong_in_vllm_on_a_cpu_is_off_for_the_models_where_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nemotron_h"}')
    flag, flags = "--no-enable-prefix-caching", f"--inference.model.name {tmp_path}"
    assert [flag in arguments(flags, on) for on in (CPU, GPUS)] == [True, False]
    for described in ('{"model_type": "lfm2"}', '{"model_type": "deepseek_v3", "kv_lora_rank": 512}'):
        (tmp_path / "config.json").write_text(described)
        assert value_of("--compilation-config", flags) == '{"custom_ops": ["-rotary_embedding"]}'
        assert value_of("--attention-backend", flags) == ("CPU_MLA" if "kv_lora_rank" in described else None)


def test_variables_of_the_engine_follow_from_the_configuration():
    assert environment(resolved())["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment(resolved(on=GPUS))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in environment(resolved(ADAPTER))
    # the next rank that the engine knows
    assert [Lora(rank=rank).engine_rank for rank in (1, 2, 8, 9, 300, 512)] == [1, 8, 8, 16, 320, 512]


def test_the_engine_checks_the_token_in_the_outermost_middleware(monkeypatch):
    for token in ("a-token-for-tests-0123456789", ""):
        monkeypatch.setenv(TOKEN, token)
        assert arguments()[-2:] == ["--middleware", "trireme.transport.bearer.RequireToken"]
        assert "a-token" not in " ".join(arguments())


def test_synchronous_router_replay_on_a_cpu_shares_no_prefixes():
    """What ran before a request must not show in its bits: router replay needs the cache, so nothing may match."""
    both = f"{SYNCHRONOUS} {REPLAY}"
    assert [resolved(flags).shares_prefixes for flags in (SYNCHRONOUS, REPLAY, both)] == [True, True, False]
    assert resolved(both, on=GPUS).shares_prefixes


def test_requests_take_the_short_way_unless_vllms_own_has_something_to_do(monkeypatch):
    assert FAST_PATH in arguments()
    for name in ("enable-log-requests", "enable-log-outputs", "otlp-traces-endpoint"):
        assert FAST_PATH not in arguments(f"--inference.args.{name} given"), name
    monkeypatch.setenv("VLLM_API_KEY", "given")
    assert FAST_PATH not in arguments()


def test_names_are_those_of_the_installed_vllm():
    source = Path(find_spec("vllm").origin).parent / "tool_parsers" / "__init__.py"
    assigned = [node for node in parse(source.read_text()).body if isinstance(node, ast.Assign)]
    table = next(node for node in assigned if "REGISTER" in ast.unparse(node.targets[0]))
    assert set(parser_names("tool_call_parser")) == set(ast.literal_eval(table.value))
    assert {"qwen3", "deepseek_r1"} <= set(parser_names("reasoning_parser"))
    assert {"temperature", "stop_token_ids", "ignore_eos", "structured_outputs"} <= set(sampling_names())
