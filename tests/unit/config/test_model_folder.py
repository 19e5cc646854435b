"""Models and data that cannot be trained on are refused before anything starts, for `rl` and `sft` alike."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.models.tiny_tokenizer import write_tokenizer
from support.runs.resolved_runs import CPU, ENV, GPUS, refusals, resolved
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.load import load_config
from trireme.config.model.folder import model_launch_problems, num_experts_of, read_config
from trireme.config.resolve import resolve_sft
from trireme.config.rules.check import check_sft, launch_warnings
from trireme.config.rules.run import run_tokenizer_problems
from trireme.config.sft import SftConfig, data_files, is_on_a_hub
from trireme.config.trainer import TrainerModel
from trireme.inference.server import server_arguments

TABLE = "trainer.model"
NO_TENSORS = b"\x02" + bytes(7) + b"{}"  # a safetensors file
CUSTOM = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
FAMILIES = ("qwen2", "llama", "gemma3_text", "qwen3_moe", "mixtral", "phi3", "glm4_moe")
SINKS = {"model_type": "gpt_oss"}
FLASH = {"attn": "flash_attention_3", "optimization_dtype": "bfloat16", "device": "cuda"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    describe(folder)
    return folder


def describe(folder: Path, **changes: Any) -> None:
    config = {"model_type": "qwen3", "num_attention_heads": 4, "architectures": ["Qwen3ForCausalLM"]} | changes
    (folder / "config.json").write_text(json.dumps(config))


def found(folder: Path, *, device: str = "cpu", **settings: Any) -> str:
    return "\n".join(model_launch_problems(TABLE, TrainerModel(name=str(folder), **settings), device))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantized (awq)"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "(fp8, weight_block_size = None)"),
        ({"model_type": "qwen33"}, 'no architecture "qwen33"'),
        *(({"model_type": kind}, "would see each other") for kind in ("mamba", "jamba", "rwkv", "minimax")),
        ({"model_type": "llama4_text"}, "attends within chunks"),
        (CUSTOM, "trust_remote_code = true"),
        (SINKS, "expected one of eager."),
        ({"model_type": "mistral3"}, "no causal language model for mistral3"),
        *(({"model_type": kind}, "attends to later tokens") for kind in ("bert", "xlm-roberta", "electra", "reformer")),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "attends to later tokens"),
        ({"model_type": "llama", "is_causal": False}, "attends to later tokens"),
        *(({"model_type": kind, "is_decoder": True}, "padding token") for kind in ("roberta", "camembert", "xmod")),
        *(({"model_type": kind}, "model with an encoder") for kind in ("bart", "whisper", "bigbird_pegasus")),
        ({"model_type": "phimoe"}, "draws its experts at random"),
        *(({"model_type": kind, "alibi": True}, "ALiBi") for kind in ("bloom", "mpt", "falcon")),
        ({"model_type": "minimax_m3_vl_text", "layer_types": ["minimax_m3_sparse"]}, "sparse attention"),
        *(({"model_type": kind}, "_no_split_modules") for kind in ("ctrl", "biogpt", "openai-gpt")),
        ({"model_type": "musicgen"}, "writes sounds"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(folder, config, words):
    describe(folder, **config)
    assert words in found(folder)


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        *(({"model_type": kind}, {"attn": "sdpa", "device": "cuda"}, "") for kind in FAMILIES),
        *(({"model_type": kind}, {"attn": "flex_attention", "device": "cuda"}, "") for kind in FAMILIES),
        (CUSTOM, {"trust_remote_code": True}, ""),
        (SINKS, {"attn": "eager"}, ""),
        (SINKS, {"device": "cuda"}, "expected one of flex_attention, eager."),
        (SINKS, {"attn": "flex_attention"}, "runs on GPUs only"),
        # without its package, and with nothing to install: scores of gpt-oss have sinks, those of Gemma 2 a cap
        ({}, FLASH, ""),
        (SINKS, FLASH, "expected one of flex_attention, eager"),
        ({"model_type": "gemma2"}, FLASH, "eager or flex_attention"),
        # attention heads are shared by ranks
        ({}, {"cp": 2}, ""),
        ({}, {"cp": 3}, "has 4 attention heads"),
    ],
)
def test_settings_that_fit_the_model_are_accepted_but_no_others(folder, config, settings, words):
    describe(folder, **config)
    assert words in (refused := found(folder, **settings))
    assert bool(refused) == bool(words)


@pytest.mark.parametrize(
    ("described", "flags", "attention", "words"),
    [
        ({"model_type": "gemma2"}, "", "eager", ""),
        ({"model_type": "vaultgemma", "attn_logit_softcapping": 30.0}, "", "eager", ""),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, "", "sdpa", ""),
        ({"model_type": "gemma2"}, "--trainer.model.attn eager", "eager", ""),
        ({"model_type": "gemma2"}, "--trainer.model.attn sdpa", "sdpa", 'attn = "sdpa" ... attn_logit_softcapping'),
        ({"model_type": "gemma2"}, "--trainer.model.cp 2", "sdpa", "attn_logit_softcapping ... cp = 1"),
        *(({"model_type": kind}, "", "eager", "") for kind in ("gpt_oss", "gptj")),
        ({"model_type": "gptj"}, "--trainer.model.attn sdpa", "sdpa", "sdpa ... expected one of eager"),
    ],
)
def test_attention_is_eager_if_sdpa_lacks_a_feature_of_the_model(folder, described, flags, attention, words):
    describe(folder, **described)
    flags = f"--model.name {folder} {flags}"
    assert resolved(flags).trainer.model.attn == attention
    assert len(refusals(flags, words or "softcapping", at_launch=True)) == bool(words)
    argv = ["--data", "some.jsonl", "--model.name", str(folder), *flags.replace("trainer.", "").split()[2:]]
    assert resolve_sft(load_config(argv, SftConfig, program="sft")[0], CPU).model.attn == attention


ON_CPU = {"attn": "sdpa", "dtype": "float32"}
SEES = {"model_type": "qwen3_5", "vision_config": {}, "rope_scaling": {"mrope_section": [3, 3, 2]}}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4}
REPLAY = "--trainer.model.moe.router-replay true"
VLM = "--model.vlm.language-model-attr model.language_model"


@pytest.mark.parametrize(
    ("described", "flags", "words", "chosen"),
    [
        ({"max_position_embeddings": 512}, "--seq-len 512", "", ON_CPU),
        ({"max_position_embeddings": 512}, "--seq-len 513", "positions end at 512", ON_CPU),
        ({"model_type": "gpt2", "n_positions": 512}, "--seq-len 513", "positions end at 512", ON_CPU),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": 4.0}}, "--seq-len 513", "", ON_CPU),
        ({"model_type": "nemotron_h"}, "", "", ON_CPU),
        ({"model_type": "mamba2"}, "", "", ON_CPU | {"attn": "eager"}),
        ({"model_type": "qwen3_next"}, "", "", ON_CPU | {"dtype": "bfloat16"}),
        ({"model_type": "qwen3_next"}, "--inference.model.dtype float32", "expected bfloat16", ON_CPU),
        ({"model_type": "lfm2"}, "--trainer.model.cp 2", "model.cp = 2 with lfm2", ON_CPU),
        ({"model_type": "lfm2"}, "--inference.args.enable-prefix-caching true", "", ON_CPU),
        ({"model_type": "lfm2_moe", "num_experts": 4}, REPLAY, "replay", ON_CPU),
        ({"model_type": "falcon_h1"}, "--inference.args.enable-prefix-caching true", "enable_prefix_caching", ON_CPU),
        ({"model_type": "falcon_h1", "mamba_rms_norm": True}, "", "mamba_norm_before_gate", ON_CPU),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe"]}, "", "without experts", ON_CPU),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*E"}, "", "without experts", ON_CPU),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "", "", ON_CPU),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 64, "qk_rope_head_dim": 8}, "", "rope_head_dim = 72", ON_CPU),
        (SEES, "", "", ON_CPU | {"dtype": "bfloat16"}),
        (SEES, "--trainer.model.from-scratch true", "also sees", None),
        (SEES, "--inference.args.language-model-only false", "tower", None),
        (SEES | {"model_type": "qwen2_5_vl"}, VLM, "", ON_CPU),
        (SEES | {"model_type": "qwen2_5_vl"}, "", "no text model ... [model.vlm]", ON_CPU),
        (SEES | {"model_type": "qwen2_5_vl"}, f"{VLM} --trainer.model.cp 2", "cannot share its pictures", ON_CPU),
        (SEES, f"{VLM} --trainer.model.cp 2", "carry a state", None),
        (SEES, f"{VLM} --trainer.model.from-scratch true", "", None),
        ({"model_type": "qwen3_5"}, VLM, "cannot give pictures", None),
        (SEES | {"rope_scaling": None}, VLM, "has no mrope_section", None),
        (SEES | {"model_type": "gemma3"}, VLM, "cannot give pictures", None),
        ({"model_type": "olmo_hybrid"}, "--inference.model.dtype bfloat16", "does not serve olmo_hybrid", None),
        ({"model_type": "nemotron_h"}, "--trainer.model.lora.sync adapter", 'expected "merged"', ON_CPU),
        (EXPERTS, "--trainer.model.lora.sync adapter", "with experts", ON_CPU),
        (EXPERTS, REPLAY, "", ON_CPU),
        (EXPERTS, "--inference.args.data-parallel-size 2", "exchange", ON_CPU),
        ({"model_type": "mixtral", "num_local_experts": 0}, REPLAY, "mixture of experts", ON_CPU),
    ],
)
def test_options_that_a_model_cannot_support_are_refused_at_launch(folder, described, flags, words, chosen):
    describe(folder, **described)
    flags = f"--model.name {folder} {flags}"
    run = resolved(flags)
    if chosen:
        assert {"attn": run.trainer.model.attn, "dtype": run.inference.model.dtype} == chosen
    assert len(refusals(flags, words or str(folder), at_launch=True)) == bool(words)


@pytest.mark.parametrize(("dtype", "is_refused"), [("float32", True), ("bfloat16", False), ("auto", False)])
def test_latent_attention_in_float32_is_refused_on_gpus(folder, dtype, is_refused):
    describe(folder, model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    flags = f"--model.name {folder} --inference.model.dtype {dtype}"
    assert len(refusals(flags, "expected bfloat16 or float16", on=GPUS, at_launch=True)) == is_refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model.vlm.freeze-vision-encoder false --trainer.model.lora.rank 4", "vision encoder included"),
        ("--inference.args.language-model-only true", "inference.args.language_model_only"),
        ("--inference.args.mm-processor-kwargs 1", "inference.args.mm_processor_kwargs"),
        ("--orchestrator.teacher.base-url http://127.0.0.1:1", "no teacher"),
        ("--inference.keep-prefix-cache running", 'keep_prefix_cache = "running" ... expected "never"'),
    ],
)
def test_run_with_pictures_refuses_options_that_conflict_with_them(folder, flags, words):
    describe(folder, **SEES)
    assert len(refusals(f"--model.name {folder} {VLM} {flags}", words)) == 1


def test_low_bit_weights_in_blocks_are_accepted(folder):
    for described in ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "mxfp4"}):
        describe(folder, quantization_config=described)
        assert refusals(f"--model.name {folder}", str(folder), at_launch=True) == []
        low = f"--model.name {folder} --inference.args.quantization"
        assert refusals(f"{low} fp8_per_block", str(folder), at_launch=True) == []
        precise = f"{low} fp8_per_block --inference.model.dtype float32"
        assert len(refusals(precise, "float32 ... expected half precision", at_launch=True)) == 1
        assert len(refusals(f"{low} awq", 'quantization = "awq" - expected one of fp8_', at_launch=True)) == 1
        own = f"--model.name {folder} --inference.args.load-format dummy"
        assert len(refusals(own, "inference.args.load_format ... Remove the line", at_launch=True)) == 1
    assert resolved(f"{low} fp8_per_block --device cpu").inference.model.dtype == "bfloat16"
    describe(folder, text_config={"quantization_config": {"quant_method": "mxfp4"}})
    arguments = server_arguments(resolved(f"--model.name {folder}"))
    plain = {"quantization_config": None}
    assert json.loads(arguments[arguments.index("--hf-overrides") + 1]) == plain | {"text_config": plain}


def test_base_model_needs_safetensors_unless_trained_from_scratch(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has neither model.safetensors nor" in found(folder)
    assert found(folder, from_scratch=True) == ""


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))})


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"model.safetensors.index.json": INDEX, **dict.fromkeys(SHARDS, "ab")}, "two sets of weights"),
        ({"model.safetensors.index.json": INDEX, "model.safetensors": None}, "names model-00001-of-00002.safetensors"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "model.safetensors"}}'}, ""),
        ({"model.safetensors.index.json": INDEX, "model.safetensors": None, **dict.fromkeys(SHARDS, "a")}, ""),
        ({"model.safetensors": None, SHARDS[0]: "a"}, "and no model.safetensors.index.json"),
        (dict.fromkeys(SHARDS, "a"), "two sets of weights: model.safetensors, and model-00001"),
        ({"model.fp16.safetensors": "a"}, "and model.fp16.safetensors"),
        ({"consolidated.safetensors": "layers.0.a", "adapter_model.safetensors": "x", "pytorch_model.bin": "a"}, ""),
        ({"model.safetensors": None, "pytorch_model.bin": "a"}, "has neither"),
    ],
)
def test_one_set_of_weights_is_meant_and_whole(folder, others, words):
    for name, content in {"model.safetensors": "a", **others}.items():
        (folder / name).unlink(missing_ok=True)
        if name.endswith(".json"):
            (folder / name).write_text(content)
        elif content is not None:
            save_file({each: np.ones(2, np.float32) for each in content.split()}, folder / name)
    assert words in found(folder)
    assert bool(found(folder)) == bool(words)


@pytest.mark.parametrize("kind", [np.float32, np.float16, "bfloat16"])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3e4])
def test_a_tensor_that_is_not_finite_is_named(folder, kind, odd):
    values = np.full((3, 5), 2.0, np.float32)
    values[1, 2] = odd
    if kind == "bfloat16":
        bits, shape = (values.view(np.uint32) >> 16).astype("<u2").tobytes(), list(values.shape)
        header = json.dumps({"a.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, len(bits)]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bits)
    else:
        save_file({"b.weight": np.ones(3, kind), "a.weight": values.astype(kind)}, folder / "model.safetensors")
    assert ("a.weight in " in found(folder)) == (not np.isfinite(odd))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"lm_head.weight": 9}, ""),
        ({"model.embed_tokens.weight": 104}, ""),
        ({"model.embed_tokens.weight": 103}, "103"),
    ],
)
def test_every_text_token_needs_a_row_in_the_embedding(folder, rows, words):
    """By the weights, or else by config.json. The tokenizer has ids up to 103, and 104 for pictures."""
    describe(folder, vocab_size=200)
    write_tokenizer(folder, extra_words=("<picture>",))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"image_token": "<picture>"}
    config["tokenizer_class"] = "LlamaTokenizer"  # by default it adds <unk>, which no file has
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    save_file({name: np.ones((count, 2), np.float32) for name, count in rows.items()}, folder / "model.safetensors")
    for section in (None, "trainer", "orchestrator"):
        config = resolved(f"{ENV} --model.name {folder}", section=section)
        message = "\n".join(run_tokenizer_problems(config, section=section))
        assert (f"tokens up to {words}" in message) == bool(words) == bool(message)


def test_a_turns_end_at_which_the_engine_does_not_stop_is_said(folder):
    write_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    def warned(flags: str = "") -> bool:
        (*found,) = launch_warnings(resolved(f"{ENV} --model.name {folder} {flags}"))
        return any("<|im_end|> (id 2), and the engine stops at id 0" in warning for warning in found)

    assert warned()
    assert not warned("""--orchestrator.sampling.extra-body '{"stop_token_ids": [2]}'""")
    describe(folder, eos_token_id=2)
    assert not warned()
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')  # it counts instead of config.json
    assert warned()
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert not warned()


def test_sft_refuses_what_rl_does_and_has_neither_engines_nor_routes(folder, tmp_path):
    describe(folder, model_type="qwen33")
    (tmp_path / "data.jsonl").touch()

    def refused(flags: str) -> str:
        argv = ["--data", str(tmp_path / "data.jsonl"), *flags.split()]
        with pytest.raises(ConfigError) as error:
            check_sft(resolve_sft(load_config(argv, SftConfig, program="sft")[0], CPU), CPU)
        return str(error.value)

    describe(folder, model_type="gpt2", n_positions=512)
    assert "a table of 512 positions" in refused(f"--model.name {folder} --seq-len 513 --model.cp 3")
    describe(folder, model_type="qwen33")
    message = refused(f"--model.name {folder} --model.cp 3")
    assert "model.cp = 3 with 1 ranks" in message
    assert 'no architecture "qwen33"' in message
    for flag in ("model.lora.sync adapter", "model.moe.router_replay true"):
        assert flag.split()[0] in refused(f"--model.name a/b --{flag}")


def test_experts_are_counted_under_any_of_their_names(folder):
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        for described in ({key: 6}, {"text_config": {key: 6}}, {"ffn_config": {key: 6}}):
            describe(folder, **described)
            assert num_experts_of(read_config(str(folder))) == 6


def load(flags: str, devices: Devices = CPU) -> SftConfig:
    """Load and check a run of `sft` in a folder with some data."""
    Path("here.jsonl").touch()
    config, _ = load_config(shlex.split(f"--model.name a/b {flags}"), SftConfig, program="sft")
    config = resolve_sft(config, devices)
    check_sft(config, devices)
    return config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "no data is given"),
        ("--data heer.jsonl", "Near it: here.jsonl."),
        ("--data empty", "a folder without data"),
        ("--data data.csv", "expected one of .jsonl, .json, .parquet, .py"),
        ("--data here.jsonl --validation none.jsonl", 'validation = "none.jsonl" does not exist'),
        ("--data here.jsonl --validation here.jsonl --validation-fraction 0.1", "one of the two"),
        ("--data here.jsonl --validation-interval 5", "nothing to measure on"),
        ("--data here.jsonl --num-epochs 2 --max-steps 7", "max_steps = 7 and num_epochs = 2"),
        ("--data here.jsonl --loss-on []", "loss_on = []"),
        ("--data here.jsonl --chat-template none.jinja", 'chat_template = "none.jinja" is no file'),
        ("--data here.jsonl --micro-batch-tokens 8", "as the longest sample"),
        ("""--source '[{data = "none.json"}]'""", 'source[0].data = "none.json" does not exist'),
        ("--learning-rate 1", "Did you mean `--optim.lr`?"),
        ("--gradient-checkpointing 1", "Did you mean `--model.ac.freq`?"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(flags, words, here):
    Path("data.csv").touch()
    Path("empty").mkdir()
    with pytest.raises(ConfigError) as error:
        load(flags)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("flags", "data"),
    [
        ("--data here.jsonl --validation here.jsonl --validation-interval 5", "here.jsonl"),
        ("--data here.jsonl --validation-fraction 0.1 --validation-interval 5", "here.jsonl"),
        ("--data here.jsonl --num-epochs 2 --scheduler.type wsd --scheduler.decay-steps 200", "here.jsonl"),
        ("--data folder", "folder"),
        ("--data owner/name", "owner/name"),
        ("--data.path here.jsonl", "here.jsonl"),
        ("@ path.toml", "here.jsonl"),
        ("@ name.toml", "here.jsonl"),
    ],
)
def test_sft_data_may_be_a_file_a_folder_or_a_dataset_name(flags, data, here):
    Path("folder").mkdir()
    for name in ("b.jsonl", "a.parquet", "c.json", "notes.md", "make.py"):
        Path("folder", name).touch()
    for key in ("path", "name"):
        Path(f"{key}.toml").write_text(f'[data]\n{key} = "here.jsonl"\n')
    assert load(flags).sources[0].data == data
    assert [path.name for path in data_files(Path("folder"))] == ["a.parquet", "b.jsonl", "c.json"]


def test_more_ranks_than_gpus_are_refused(here):
    load("--data here.jsonl --num-ranks 1", Devices(gpus=("0",), cores=4))
    with pytest.raises(ConfigError, match="one GPU per rank"):
        load("--data here.jsonl --num-ranks 2", Devices(gpus=("0",), cores=4))


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_handles_need_ordinary_segments(name, monkeypatch):
    one, two = (Devices(gpus=("0", "1")[:count], cores=4) for count in (1, 2))
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    assert len(refusals("", f"{name}=max_split_size_mb ... Unset", on=one, at_launch=True)) == 1
    assert refusals("", name, on=two, at_launch=True) == []
    monkeypatch.setenv(name, "expandable_segments:False")
    assert refusals("", name, on=one, at_launch=True) == []


def test_a_name_of_two_parts_is_a_hubs_unless_it_is_here(here):
    assert is_on_a_hub("owner/name")
    assert not any(map(is_on_a_hub, ("owner/name.jsonl", "./owner/name", "name")))
    Path("owner/name").mkdir(parents=True)
    assert not any(map(is_on_a_hub, ("owner/name", "owner/other")))
