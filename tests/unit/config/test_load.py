"""What users type becomes a configuration, or one message that says what to type instead."""

import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from support.runs.resolved_runs import value_at
from trireme.base.errors import ConfigError
from trireme.config.compatibility import NAMES_ELSEWHERE
from trireme.config.load import load_run_config
from trireme.config.run import RunConfig
from trireme.config.section import walk
from trireme.config.sft import SftConfig

DATA = Path(__file__).parents[2] / "data"
pytestmark = pytest.mark.usefixtures("here")


def write(name: str, text: str) -> None:
    Path(name).write_text(text)


def load(flags: str = "", **options: Any) -> RunConfig:
    return load_run_config(shlex.split(flags), program="rl", **options)[0]


def refusal(flags: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(flags, **options)
    return str(error.value)


def test_later_files_win_and_flags_win_over_files():
    assert load() == RunConfig()
    tables = "trainer.optim = {lr = 0.1, weight_decay = 0.5}\norchestrator.env = [{id = 'x'}, {id = 'y'}]"
    write("a.toml", f"max_steps = 1\nseed = 1\nseq_len = 1\n{tables}")
    write("b.toml", "max_steps = 2\nseq_len = 2\n[trainer.optim]\nlr = 0.2\n[[orchestrator.env]]\nid = 'z'")
    config = load("--seq-len 3 @ a.toml @b.toml")
    assert (config.seed, config.max_steps, config.seq_len) == (1, 2, 3)
    assert (config.trainer.optim.lr, config.trainer.optim.weight_decay) == (0.2, 0.5)
    assert [env.id for env in config.orchestrator.env] == ["z"]
    write("c.toml", '[orchestrator.eval]\nnum_examples = "none"')
    assert value_at(load("@ c.toml"), "orchestrator.eval.num_examples") is None


def missing(words: str, message: str) -> list[str]:
    """Return those of several words, separated by " ... ", which a message lacks."""
    return [part for part in words.split(" ... ") if part not in message]


def test_the_environment_wins_over_defaults_and_nothing_else(monkeypatch):
    variables = {"MAX_STEPS": "3", "TRAINER__OPTIM__LR": "0.5", "TRAINER_GPU_IDS": "0,1", "WANDB__PROJECT": "P"}
    for name, value in (variables | {"RESUME": "yes", "SEED": "", "TOKEN": "secret"}).items():
        monkeypatch.setenv(f"TRIREME_{name}", value)
    config = load()
    assert (config.max_steps, config.resume, config.seed, config.trainer_gpu_ids) == (3, True, 0, (0, 1))
    assert (config.trainer.optim.lr, value_at(config, "wandb.project")) == (0.5, "P")
    write("a.toml", "max_steps = 4\n[trainer.optim]\neps = 0.1")
    config = load("@ a.toml --trainer.optim.lr 0.25")
    assert (config.max_steps, config.trainer.optim.lr, config.trainer.optim.eps) == (4, 0.25, 0.1)
    monkeypatch.setenv("TRIREME_MAX_STEPS", "many")
    assert 'TRIREME_MAX_STEPS: `max_steps = "many"` - expected integer > 0' in refusal("")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TRAINER_OPTIM_LR", ": ... Did you mean `TRIREME_TRAINER__OPTIM__LR`?"),
        ("MAX_STEP", "Did you mean `TRIREME_MAX_STEPS`?"),
        ("INFERENCE_SERVER_PORT", "Did you mean `TRIREME_INFERENCE__SERVER__PORT`?"),
        ("TRAINER__OPTM__LR", ": unknown key `trainer.optm` ... `trainer.optim`?"),
        ("TRAINER__OPTIM__LEARNING_RATE", ": unknown key ... Did you mean `trainer.optim.lr`"),
    ],
)
def test_misspelt_environment_variable_is_refused_with_a_suggestion(name, words, monkeypatch):
    for other in ("RUN", "NODE"):
        monkeypatch.setenv(f"TRIREME_{other}", "1")
    for service in ("TRIREME", "TRIREME_INFERENCE", "TRIREME_INFERENCE_SERVER"):  # what Kubernetes sets for each
        url, port = "tcp://10.96.4.7:8000", "PORT_8000_TCP"
        values = {"SERVICE_HOST": "10.96.4.7", "SERVICE_PORT": "8000", "SERVICE_PORT_HTTP": "8000", "PORT": url}
        values |= {port: url, f"{port}_PROTO": "tcp", f"{port}_PORT": "8000", f"{port}_ADDR": "10.96.4.7"}
        for end, value in values.items():
            monkeypatch.setenv(f"{service}_{end}", value)
    load()
    monkeypatch.setenv(f"TRIREME_{name}", "1")
    assert missing(f"TRIREME_{name} ... {words}", refusal("")) == []


def test_each_process_may_have_its_file_and_any_table():
    write("t.toml", 'max_steps = 7\n[optim]\nlr = 0.1\n[model]\nname = "a/b"')
    write("o.toml", 'batch_size = 32\n[[env]]\nid = "x"')
    write("i.toml", "gpu_memory_utilization = 0.5\n[model]\nmax_model_len = 64")
    config = load("--trainer @ t.toml --orchestrator @ o.toml --inference @i.toml --trainer-gpus 2 --inference-gpus 6")
    assert (config.trainer.optim.lr, config.trainer.model.name, config.max_steps) == (0.1, "a/b", 7)
    assert (config.orchestrator.batch_size, config.orchestrator.env[0].id) == (32, "x")
    assert (config.inference.gpu_memory_utilization, config.inference.model.max_model_len) == (0.5, 64)
    assert (config.trainer_gpus, config.inference_gpus) == (2, 6)
    write("lora.toml", "rank = 4")
    assert value_at(load("--trainer.model.lora @ lora.toml"), "trainer.model.lora.rank") == 4
    assert "a file can fill a table" in refusal("--max-steps @ lora.toml")


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--resume", "resume", True),
        ("--resume false", "resume", False),
        ("--no-resume", "resume", False),
        ("--restart off", "supervisor.restart", False),
        ("--trainer.model.compile --trainer.model.no-compile", "trainer.model.compile", False),
        ("--trainer-gpu-ids 0 1", "trainer_gpu_ids", [0, 1]),
        ("--trainer-gpu-ids 0,1", "trainer_gpu_ids", [0, 1]),
        ("--trainer-gpu-ids '[0, 1]'", "trainer_gpu_ids", [0, 1]),
        ("--trainer-gpu-ids 0, 1", "trainer_gpu_ids", [0, 1]),
        ("--orchestrator.advantage.reward-clip -inf 1", "orchestrator.advantage.reward_clip", [-math.inf, 1]),
        # no item of a text list is dropped or cut apart
        ("--orchestrator.sampling.stop 'a,b, c'", "orchestrator.sampling.stop", ["a", "b", "c"]),
        ("--orchestrator.sampling.stop 'a,b, '", "orchestrator.sampling.stop", ["a", "b"]),
        ("--orchestrator.sampling.stop 'END,'", "orchestrator.sampling.stop", ["END,"]),
        ("--orchestrator.sampling.stop ' END'", "orchestrator.sampling.stop", [" END"]),
        ("--orchestrator.sampling.stop '\n\n'", "orchestrator.sampling.stop", ["\n\n"]),
        ("--orchestrator.sampling.stop ', '", "orchestrator.sampling.stop", [", "]),
        ("--orchestrator.sampling.stop '\n' 'a, b' ''", "orchestrator.sampling.stop", ["\n", "a, b", ""]),
        ("--orchestrator.sampling.stop x --orchestrator.sampling.stop ''", "orchestrator.sampling.stop", []),
        ("--trainer.ckpt.resume_step=-1", "trainer.ckpt.resume_step", -1),
        ("--trainer.ckpt.resume-step -1", "trainer.ckpt.resume_step", -1),
        # tables that are off by default
        ("--trainer.model.lora.rank 8", "trainer.model.lora.alpha", 32),
        ("--trainer.model.ac", "trainer.model.ac.freq", 1),
        ("--wandb.project P --no-wandb", "wandb", None),
        ("--wandb.project P --wandb none", "wandb", None),
        ("--wandb.project P --wandb.name none", "wandb.name", None),
        ("--trainer.loss.correction none", "trainer.loss.correction", "none"),
        # tables as JSON or TOML
        ("""--orchestrator.env '[{"id": "x", "args": {"level": 3}}]'""", "orchestrator.env.0.args", {"level": 3}),
        ("""--orchestrator.env '[{id = "x", args = {level = 3}}]'""", "orchestrator.env.0.args", {"level": 3}),
        ("""--orchestrator.env '{"id": "x", "args": {"level": 3}}'""", "orchestrator.env.0.args", {"level": 3}),
        ("--inference.args.max-num-seqs 4 --inference.args.fast", "inference.args", {"max_num_seqs": 4, "fast": True}),
    ],
)
def test_a_value_can_be_typed_in_every_usual_way(flags, key, value):
    assert value_at(load(flags), key) == value


INFINITE = """trainer.loss.correction_high trainer.optim.max_norm weight_broadcast.probe_tolerance
    supervisor.frozen_after_s supervisor.unhealthy_after_s orchestrator.buffer.pools.easy_threshold
    orchestrator.buffer.pools.hard_threshold orchestrator.filters.gibberish_logprob"""


@pytest.mark.parametrize("key", INFINITE.split())
def test_a_bound_may_be_infinite_and_is_never_nan(key):
    value = -math.inf if key.endswith(("hard_threshold", "logprob")) else math.inf
    assert value_at(load(f"--{key} {value}"), key) == value
    assert f"`--{key} nan` - expected number" in refusal(f"--{key} nan")


def test_flags_can_begin_an_array_add_to_it_and_change_one_item():
    env = "--orchestrator.env"
    first, second = load(f"{env}.0.id x {env}.0.weight 3 {env}.1.id y").orchestrator.env
    assert (first.id, first.weight, second.id) == ("x", 3, "y")
    assert (first, second) == load(f"{env}.0.weight 3 {env}.1.id y {env}.0.id x").orchestrator.env
    write("a.toml", '[[orchestrator.env]]\nid = "x"\nargs = { level = 1, hard = true }')
    (changed, added) = load(f"@ a.toml {env}.0.args.level 2 {env}.0.weight 3 {env}.1.id y").orchestrator.env
    assert (changed.id, changed.args, changed.weight, added.id) == ("x", {"level": 2, "hard": True}, 3, "y")
    assert "there is 1, counted from 0" in refusal(f"@ a.toml {env}.2.id y")
    assert "there are none" in refusal(f"{env}.1.id y")
    assert "to `orchestrator.env.weight` - there is 1, counted" in refusal(f"@ a.toml {env}.weight 3")
    assert "Write `--orchestrator.env.0.…` for the first" in refusal(f"{env}.args.level 3")


@pytest.mark.parametrize(
    ("flags", "max_steps", "run_model", "trainer_model"),
    [
        ("@ own.toml --optim.eps 0.1", 3, None, "a/b"),
        ("@ run.toml --model.name c/d --optim.eps 0.1", 7, "c/d", None),
        ("--model.name c/d --trainer.optim.lr 0.5 --optim.eps 0.1", 100, None, "c/d"),
    ],
)
def test_a_process_reads_its_own_file_or_the_whole_runs(flags, max_steps, run_model, trainer_model):
    write("own.toml", 'max_steps = 3\n[model]\nname = "a/b"\n[optim]\nlr = 0.5')
    write("run.toml", 'max_steps = 7\n[model]\nname = "a/b"\n[trainer.optim]\nlr = 0.5\n[orchestrator]\nbatch_size=16')
    config = load(f"{flags} --seq-len 9 --no-restart", section="trainer")
    assert (config.max_steps, config.seq_len, config.supervisor.restart) == (max_steps, 9, False)
    assert (config.model.name, config.trainer.model.name) == (run_model or RunConfig().model.name, trainer_model)
    assert (config.trainer.optim.lr, config.trainer.optim.eps) == (0.5, 0.1)


def test_the_older_name_of_the_environment_table_is_accepted_alone():
    whole = load(f"--orchestrator @ {DATA / 'guide_orchestrator.toml'}")
    alone = load(f"@ {DATA / 'guide_orchestrator.toml'}", section="orchestrator")
    assert whole == alone
    assert value_at(alone, "orchestrator.env.0.args.max_concurrent") == 512
    write("o.toml", '[[env]]\nid = "x"\n[environment]\nid = "y"')
    assert "two names of one key" in refusal("@ o.toml", section="orchestrator")


def test_a_name_from_elsewhere_leads_to_a_key_that_exists():
    assert {*NAMES_ELSEWHERE} <= {key for root in (RunConfig, SftConfig) for key, _ in walk(root)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[trainer.optim]\nlearning = 3", "a.toml: unknown key `trainer.optim.learning`"),
        ("[sampling]\ntop_p = 1.0\n[trainer.optim]\nlr = 0.1", "`orchestrator.sampling`"),
        ('[trainer.optim]\nlr = "fast"', 'a.toml: `trainer.optim.lr = "fast"` - expected number >= 0'),
        ("max_steps = true", "expected integer > 0"),
        ("max_steps = 0", "a.toml: `max_steps = 0` - expected integer > 0 ... `max_steps = 100`"),
        ("resume = 2", "`resume = 2` - expected true or false"),
        ("seed = -1", "a.toml: `seed = -1` - expected integer >= 0 <= 4294967295"),
        ("weight_broadcast.timeout_s = inf", "`weight_broadcast.timeout_s = inf` - expected finite number > 0"),
        ("[inference]\ngpu_memory_utilization = 1.5", "utilization = 1.5` - expected number > 0 <= 1"),
        ("[trainer.optim]\nbetas = [0.9, 1.0]", "betas = [0.9, 1.0]` - expected list of 2 x number >= 0 < 1"),
        ("[orchestrator.sampling]\ntop_k = -2", "top_k = -2` - expected integer >= -1"),
        ("[orchestrator.buffer.pools]\nnormal_weight = 0", "expected number > 0 ... never seen: at 0"),
        ("[[orchestrator.env]]\nargs = {}", "a.toml: `orchestrator.env[0].id` is missing - expected text"),
        ('[orchestrator]\nenv = ["x"]', '    [[orchestrator.env]]\n    id = "x"'),
        ('model = "Qwen/Qwen3-0.6B"', '    [model]\n    name = "Qwen/Qwen3-0.6B"'),
        ("orchestrator.zero_truncated_completions = true", "not here ... `orchestrator.filters.truncated`"),
        ('orchestrator.client.base_url = ["http://h/v1"]', "`hosts.inference`"),
        ("trainer.unheard_of.batch_size = 2", "Nothing here is set by that name"),
        ("max_steps = 1\n\n[model]\nname = tiny\n", "a.toml, line 4 ... `name = tiny` ... Text needs quotes"),
        pytest.param("max_steps = " + "[" * 80 + "]" * 80, "levels deep", id="deep list"),
        pytest.param("[inference.args]\n" + ".".join("a" * 1_000) + " = 1", "levels deep", id="deep table"),
        pytest.param("\n".join(f"k{i} = 1" for i in range(300)), "300 problems ... and 270 more", id="many problems"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file_and_the_remedy(text, words):
    write("a.toml", text)
    assert missing(words, refusal("@ a.toml")) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("a.toml", "write `@ a.toml`"),
        ("-s session", "flags begin with two dashes"),
        ("@", "expected a file after it"),
        ("--max-steps", "came without a value - expected integer > 0"),
        ("--max-steps 1 2", "`--max-steps 1 2` - expected integer > 0"),
        ("--no-max-steps", "takes integer > 0"),
        ("--trainer.optim.betas 0.9", "`--trainer.optim.betas 0.9` - expected list of 2 x number"),
        ("--device cud", "expected auto | cpu | cuda. Did you mean `cuda`?"),
        ("--trainer.model.ac full", "--trainer.model.ac.freq"),
        ("@ revers-text.toml", "revers-text.toml does not exist ... Near it: reverse-text.toml"),
        ("--trainer @ reverse-text.toml", "Did you mean `optim.lr`?"),
        ("--run run.json --max-steps 3", "expected nothing else"),
        ("--run none.json", "none.json does not exist"),
        ("--inference.args.a 2 --inference.args.a.b 3", "`inference.args.a` is 2 - expected a table"),
        ("--run run.json", "run.json is not a resolved configuration of this version"),
        ("@ list.json", "expected an object"),
        ("@ half.json", "half.json, line 1: not valid JSON"),
        ("@ odd.toml --trainer.optim.lr 1", "`trainer = [1]` - expected table"),
        ("--trainer.optim.learning-rate 1", "unknown flag `--trainer.optim.learning-rate` ... `--trainer.optim.lr`?"),
        ("--no-resumee", "Did you mean `--resume`"),
        ("--orchestrator.env.0.idd x", "Did you mean `--orchestrator.env.0.id`"),
        ("--beta 1", "Did you mean `--trainer.loss.beta`"),
    ],
)
def test_a_slip_of_the_keyboard_is_answered_with_what_to_type(flags, words):
    write("list.json", "[1]")
    write("half.json", '{"name": "\\ud800"}')
    write("odd.toml", "trainer = [1]")
    write("reverse-text.toml", "lr = 1e-5")
    write("run.json", '{"max_stepz": 1}')
    assert missing(words, refusal(flags)) == []


def test_problems_of_all_sources_are_shown_together():
    write("a.toml", "max_stepz = 1")
    write("b.toml", "max_steps = 'x'")
    assert refusal("@ a.toml @ b.toml @ c.toml --seq-len 0 --lr 1").startswith("5 problems in the configuration.\n1. ")
