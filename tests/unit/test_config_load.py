"""What users type becomes a configuration, or one message that says what to type instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trireme.base.errors import ConfigError
from trireme.config.aliases import ALIASES, KNOWN_ELSEWHERE, SHORT_FLAGS
from trireme.config.fields import walk
from trireme.config.load import load_config, load_run_config
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def load(*argv: str, **options: Any) -> RunConfig:
    return load_run_config(list(argv), program="rl", **options)[0]


def refusal(*argv: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(*argv, **options)
    return str(error.value)


def test_nothing_typed_is_all_defaults() -> None:
    assert load() == RunConfig()


def test_later_files_win_and_flags_win_over_files() -> None:
    write("a.toml", "max_steps = 1\nseed = 1\nseq_len = 1\n[trainer.optim]\nlr = 0.1\nweight_decay = 0.5")
    write("b.toml", "max_steps = 2\nseq_len = 2\n[trainer.optim]\nlr = 0.2")
    config = load("--seq-len", "3", "@", "a.toml", "@b.toml")
    assert (config.seed, config.max_steps, config.seq_len) == (1, 2, 3)
    assert (config.trainer.optim.lr, config.trainer.optim.weight_decay) == (0.2, 0.5)  # tables merge


def test_lists_are_replaced_not_joined() -> None:
    write("a.toml", '[[orchestrator.env]]\nid = "x"\n[[orchestrator.env]]\nid = "y"')
    write("b.toml", '[[orchestrator.env]]\nid = "z"')
    assert [env.id for env in load("@", "a.toml", "@", "b.toml").orchestrator.env] == ["z"]


def test_the_example_of_the_guide_loads_as_written() -> None:
    config = load("@", str(DATA / "guide_example.toml"))
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ((0, 1, 2), (3,))
    assert config.trainer.model.lora is not None
    assert config.trainer.model.ac is not None
    assert config.trainer.model.lora.alpha == 32
    assert config.orchestrator.env[0].args == {"dataset_name": "train", "difficulty": "hard"}
    assert config.inference.model.tool_call_parser == "hermes"


@pytest.mark.parametrize(
    ("argv", "resume"),
    [
        (["--resume"], True),
        (["--resume", "true"], True),
        (["--resume=on"], True),
        (["--resume", "false"], False),
        (["--no-resume"], False),
        (["--resume", "--no-resume"], False),
    ],
)
def test_truth_values_can_be_typed_in_every_usual_way(argv: list[str], resume: bool) -> None:
    assert load(*argv).resume is resume


@pytest.mark.parametrize("argv", [["--no-restart"], ["--restart", "off"], ["--no-supervisor.restart"]])
def test_restarts_can_be_switched_off_in_a_word(argv: list[str]) -> None:
    assert load().supervisor.restart is True
    assert load(*argv).supervisor.restart is False
    assert load(*argv, section="trainer").supervisor.restart is False
    write("a.toml", "restart = false")
    assert "unknown key `restart` - no such key exists. Did you mean `supervisor.restart`?" in refusal("@", "a.toml")


def test_what_the_supervisor_takes_is_said_with_its_bounds() -> None:
    argv = ["--supervisor.max-restarts", "-1", "--supervisor.backoff-s", "-1", "--disk-timeout-s", "-1"]
    message = refusal(*argv, "--supervisor.max-restart", "3")
    assert "`--supervisor.max-restarts -1` - expected integer >= 0" in message
    assert "`--supervisor.backoff-s -1.0` - expected number > 0" in message
    assert "`--disk-timeout-s -1.0` - expected number > 0" in message
    assert "Did you mean `--supervisor.max-restarts`" in message


@pytest.mark.parametrize("flag", ["--no-trainer.model.compile", "--trainer.model.no-compile"])
def test_no_may_stand_before_the_path_or_the_name(flag: str) -> None:
    assert load("--trainer.model.compile", flag).trainer.model.compile is False


@pytest.mark.parametrize("typed", [["0", "1"], ["0,1"], ["[0, 1]"]])
def test_lists_can_be_typed_in_every_usual_way(typed: list[str]) -> None:
    assert load("--trainer-gpu-ids", *typed).trainer_gpu_ids == (0, 1)


@pytest.mark.parametrize("flag", ["--trainer.ckpt.resume-step", "--trainer.ckpt.resume_step"])
def test_dashes_and_underscores_are_the_same(flag: str) -> None:
    assert load(flag, "50").trainer.ckpt.resume_step == 50
    assert load(f"{flag}=-1").trainer.ckpt.resume_step == -1
    assert load(flag, "-1").trainer.ckpt.resume_step == -1


def test_flags_reach_into_tables_that_are_off_by_default() -> None:
    config = load("--wandb.project", "P", "--wandb.name", "N", "--trainer.model.lora.rank", "8", "--trainer.model.ac")
    assert config.wandb is not None
    assert (config.wandb.project, config.wandb.name) == ("P", "N")
    assert config.trainer.model.lora is not None
    assert (config.trainer.model.lora.rank, config.trainer.model.lora.alpha) == (8, 16)
    assert config.trainer.model.ac is not None


def test_a_table_can_be_switched_off_again() -> None:
    write("a.toml", '[wandb]\nproject = "P"')
    assert load("@", "a.toml", "--no-wandb").wandb is None
    assert load("@", "a.toml", "--wandb", "none").wandb is None


@pytest.mark.parametrize(
    "value",
    ['[{"id": "x", "args": {"level": 3}}]', '[{id = "x", args = {level = 3}}]', '{"id": "x", "args": {"level": 3}}'],
)
def test_tables_can_be_typed_as_json_or_toml(value: str) -> None:
    (env,) = load("--orchestrator.env", value).orchestrator.env
    assert (env.id, env.args) == ("x", {"level": 3})


def test_flags_can_begin_an_array_and_add_to_it() -> None:
    typed = ["--orchestrator.env.0.id", "x", "--orchestrator.env.0.weight", "3", "--orchestrator.env.1.id", "y"]
    first, second = load(*typed).orchestrator.env
    assert (first.id, first.weight, second.id) == ("x", 3, "y")
    write("a.toml", '[[orchestrator.env]]\nid = "x"')
    assert [env.id for env in load("@", "a.toml", "--orchestrator.env.1.id", "y").orchestrator.env] == ["x", "y"]
    assert "there is 1, counted from 0" in refusal("@", "a.toml", "--orchestrator.env.2.id", "y")
    assert "there are none" in refusal("--orchestrator.env.1.id", "y")


def test_flags_can_change_one_item_of_an_array() -> None:
    write("a.toml", '[[orchestrator.env]]\nid = "x"\nargs = { level = 1, hard = true }')
    (env,) = load(
        "@", "a.toml", "--orchestrator.env.0.args.level", "2", "--orchestrator.env.0.weight", "3"
    ).orchestrator.env
    assert (env.args, env.weight) == ({"level": 2, "hard": True}, 3)
    assert "there is 1, counted from 0" in refusal("@", "a.toml", "--orchestrator.env.1.weight", "3")
    assert "--orchestrator.env.0.weight" in refusal("@", "a.toml", "--orchestrator.env.weight", "3")


def test_arguments_of_an_engine_take_any_key() -> None:
    argv = ["--inference.args.max-num-batched-tokens", "4096", "--inference.args.note", "x", "--inference.args.fast"]
    assert load(*argv).inference.args == {"max_num_batched_tokens": 4096, "note": "x", "fast": True}


def test_none_says_nothing_in_files_too() -> None:
    write("a.toml", '[orchestrator.eval]\nnum_examples = "none"')
    evaluation = load("@", "a.toml").orchestrator.eval
    assert evaluation is not None
    assert evaluation.num_examples is None


def test_each_process_may_have_its_file() -> None:
    write("t.toml", 'max_steps = 7\n[optim]\nlr = 0.1\n[model]\nname = "a/b"')
    write("o.toml", 'batch_size = 32\n[[env]]\nid = "x"')
    write("i.toml", "gpu_memory_utilization = 0.5\n[model]\nmax_model_len = 64")
    files = ["--trainer", "@", "t.toml", "--orchestrator", "@", "o.toml", "--inference", "@i.toml"]
    config = load(*files, "--trainer-gpus", "2", "--inference-gpus", "6")
    assert (config.trainer.optim.lr, config.trainer.model.name, config.max_steps) == (0.1, "a/b", 7)
    assert (config.orchestrator.batch_size, config.orchestrator.env[0].id) == (32, "x")
    assert (config.inference.gpu_memory_utilization, config.inference.model.max_model_len) == (0.5, 64)
    assert (config.trainer_gpus, config.inference_gpus) == (2, 6)


def test_a_file_can_fill_any_table() -> None:
    write("lora.toml", "rank = 4")
    lora = load("--trainer.model.lora", "@", "lora.toml").trainer.model.lora
    assert lora is not None
    assert lora.rank == 4
    assert "a file can fill a table" in refusal("--max-steps", "@", "lora.toml")


# a process's own command


def test_a_process_reads_its_own_file_and_the_runs() -> None:
    write("own.toml", 'max_steps = 3\n[model]\nname = "a/b"\n[optim]\nlr = 0.5')
    config = load("@", "own.toml", "--optim.eps", "0.1", "--seq-len", "9", section="trainer")
    assert (config.max_steps, config.seq_len) == (3, 9)
    assert config.trainer.model.name == "a/b"
    assert (config.trainer.optim.lr, config.trainer.optim.eps) == (0.5, 0.1)


def test_a_process_reads_the_whole_runs_file_too() -> None:
    write("run.toml", '[model]\nname = "a/b"\n[trainer.optim]\nlr = 0.5\n[orchestrator]\nbatch_size = 16')
    config = load("@", "run.toml", "--model.name", "c/d", "--optim.eps", "0.1", section="trainer")
    assert (config.model.name, config.trainer.model.name) == ("c/d", None)
    assert (config.trainer.optim.lr, config.trainer.optim.eps) == (0.5, 0.1)


def test_without_a_whole_file_a_processs_flags_mean_its_own_table_first() -> None:
    config = load("--model.name", "c/d", "--trainer.optim.lr", "0.5", section="trainer")
    assert (config.model.name, config.trainer.model.name) == (RunConfig().model.name, "c/d")
    assert config.trainer.optim.lr == 0.5


def test_the_older_name_of_the_environment_table_is_taken() -> None:
    whole = load("--orchestrator", "@", str(DATA / "guide_orchestrator.toml"))
    alone = load("@", str(DATA / "guide_orchestrator.toml"), section="orchestrator")
    assert whole == alone
    (env,) = alone.orchestrator.env
    assert env.args == {"split": "train", "rollouts_per_example": 8, "max_concurrent": 512}


def test_a_key_and_its_older_name_together_are_refused() -> None:
    write("o.toml", '[[env]]\nid = "x"\n[environment]\nid = "y"')
    assert "two names of one key" in refusal("@", "o.toml", section="orchestrator")


def test_every_pointer_to_our_names_points_to_a_key_that_exists() -> None:
    known = {key for key, _ in walk(RunConfig)}
    assert {*KNOWN_ELSEWHERE.values(), *ALIASES.values(), *SHORT_FLAGS.values()} <= known
    assert not (set(ALIASES) | set(SHORT_FLAGS)) & known


def test_the_same_grammar_serves_other_roots() -> None:
    config, invocation = load_config(["--data", "d.jsonl", "--optim.lr", "0.1", "--dry-run"], SftConfig, program="sft")
    assert (config.data, config.optim.lr, invocation.dry_run) == ("d.jsonl", 0.1, True)


# the command's own flags


def test_the_commands_own_flags_are_no_part_of_the_configuration() -> None:
    config, invocation = load_run_config(["--dry-run", "--max-steps", "3"], program="rl")
    assert (invocation.dry_run, invocation.run) == (True, None)
    assert config == load("--max-steps", "3")


def test_a_resolved_run_is_loaded_alone() -> None:
    assert "expected nothing beside it" in refusal("--run", "run.json", "--max-steps", "3")
    assert "run.json does not exist" in refusal("--run", "run.json")
    write("run.json", '{"max_stepz": 1}')
    assert "run.json is not a resolved configuration of this version" in refusal("--run", "run.json")


# refusals


@pytest.mark.parametrize(
    ("argv", "suggestion"),
    [
        (["--lr", "1"], "--trainer.optim.lr"),
        (["--max-stepz", "1"], "--max-steps"),
        (["--trainer.optim.learning-rate", "1"], "--trainer.optim.lr"),
        (["--trainer.lr", "1"], "--trainer.optim.lr"),
        (["--batchsize", "1"], "--orchestrator.batch-size"),
        (["--tokenizer.name", "x"], "--trainer.tokenizer.name"),
        (["--no-resumee"], "--resume"),
        (["--orchestrator.env.0.idd", "x"], "--orchestrator.env.id"),
        (["--vllm-server-port", "1"], "--inference.server.port"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_likeliest_one(argv: list[str], suggestion: str) -> None:
    message = refusal(*argv)
    assert f"unknown flag `{argv[0].split('=')[0]}`" in message
    assert f"Did you mean `{suggestion}`" in message


def test_an_unknown_key_in_a_file_is_refused_with_the_files_name() -> None:
    write("a.toml", "lr = 1e-5\n[trainer.optim]\nlearning = 3\n[sampling]\ntop_p = 1.0")
    message = refusal("@", "a.toml")
    assert "a.toml: unknown key `lr` - no such key exists. Did you mean `trainer.optim.lr`?" in message
    assert "a.toml: unknown key `trainer.optim.learning`" in message
    assert "`orchestrator.sampling`" in message
    assert message.startswith("3 problems in the configuration.\n1. ")


def test_a_processs_file_gets_suggestions_as_it_would_write_them() -> None:
    write("t.toml", "lr = 1e-5")
    assert "Did you mean `optim.lr`?" in refusal("--trainer", "@", "t.toml")


def test_a_wrong_type_names_its_file_its_value_and_the_type() -> None:
    write("a.toml", 'max_steps = 5\n[trainer.optim]\nlr = "fast"')
    write("b.toml", 'max_steps = "20"\nresume = 1\nseed = true\n[wandb]\nname = 3')
    message = refusal("@", "a.toml", "@", "b.toml")
    assert 'a.toml: `trainer.optim.lr = "fast"` - expected number > 0' in message
    assert 'b.toml: `max_steps = "20"` - expected integer > 0. Leave the quotes out: `max_steps = 20`.' in message
    assert "b.toml: `resume = 1` - expected true or false" in message
    assert "b.toml: `seed = true` - expected integer" in message
    assert "b.toml: `wandb.name = 3` - expected text" in message


def test_a_value_out_of_bounds_names_where_it_came_from() -> None:
    write("a.toml", "max_steps = 0\n[inference]\ngpu_memory_utilization = 1.5")
    message = refusal("@", "a.toml", "--trainer.optim.betas", "0.9", "--device", "cud")
    assert "a.toml: `max_steps = 0` - expected integer > 0. For example `max_steps = 100`" in message
    assert "a.toml: `inference.gpu_memory_utilization = 1.5` - expected number > 0 <= 1" in message
    assert "`--trainer.optim.betas [0.9]` - expected list of 2 x number" in message
    assert "`--device cud` - expected auto | cpu | cuda. Did you mean `cuda`?" in message


def test_a_missing_key_is_named_with_its_place() -> None:
    write("a.toml", "[[orchestrator.env]]\nargs = {}")
    assert "a.toml: `orchestrator.env[0].id` is missing - expected text" in refusal("@", "a.toml")


def test_text_for_activation_checkpointing_shows_the_table_to_write() -> None:
    write("a.toml", '[trainer.model]\nac = "full"')
    message = refusal("@", "a.toml")
    assert 'a.toml: `trainer.model.ac = "full"` - expected table' in message
    assert "    [trainer.model.ac]\n    freq = 1" in message
    assert "--trainer.model.ac.freq" in refusal("--trainer.model.ac", "full")


def test_a_models_name_in_place_of_its_table_shows_the_table_to_write() -> None:
    write("a.toml", 'model = "Qwen/Qwen3-0.6B"')
    assert '    [model]\n    name = "Qwen/Qwen3-0.6B"' in refusal("@", "a.toml")


def test_a_syntax_error_names_file_and_line() -> None:
    write("a.toml", "max_steps = 1\n\n[model]\nname = tiny\n")
    message = refusal("@", "a.toml")
    assert message.startswith("a.toml, line 4: not valid TOML")
    assert "the line reads `name = tiny`" in message
    assert "Text needs quotes" in message


def test_a_missing_file_lists_files_with_like_names() -> None:
    write("reverse-text.toml", "")
    assert "revers-text.toml does not exist" in refusal("@", "revers-text.toml")
    assert "Near it: reverse-text.toml" in refusal("@", "revers-text.toml")
    assert "nowhere, a folder that does not exist either" in refusal("@", "nowhere/a.toml")


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        (["a.toml"], "write `@ a.toml`"),
        (["-s", "session"], "flags begin with two dashes"),
        (["@"], "expected a file after it"),
        (["--max-steps"], "came without a value - expected integer > 0"),
        (["--max-steps", "1", "2"], "`--max-steps 1 2` - expected integer > 0"),
        (["--no-max-steps"], "takes integer > 0"),
        (["--seed", "--resume"], "`--seed` came without a value"),
    ],
)
def test_a_slip_of_the_keyboard_is_answered_with_what_to_type(argv: list[str], advice: str) -> None:
    assert advice in refusal(*argv)


def test_problems_of_all_sources_are_shown_together() -> None:
    write("a.toml", "max_stepz = 1")
    write("b.toml", "max_steps = 'x'")
    message = refusal("@", "a.toml", "@", "b.toml", "@", "c.toml", "--seq-len", "0", "--lr", "1")
    assert message.startswith("5 problems")
