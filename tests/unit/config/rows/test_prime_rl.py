"""Files and flags of prime-rl mean here what they mean there, or are refused under their own names."""

import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.runs.resolved_runs import value_at
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.cli.command import note_translation
from trireme.config.load import load_config
from trireme.config.resolve import resolve
from trireme.config.rows.by_command import rows_for
from trireme.config.rows.rules import on_machine
from trireme.config.rules.check import check
from trireme.config.run import RunConfig
from trireme.config.section import find
from trireme.config.sft import SftConfig
from trireme.config.translation import translate
from trireme.tools.evaluate.config import EvalConfig

pytestmark = pytest.mark.usefixtures("here")
GPUS = Devices(gpus=tuple("01234567"), cores=64)


def load(text: str, flags: str = "", root: Any = RunConfig, **options: Any) -> Any:
    Path("theirs.toml").write_text(text)
    return load_config(shlex.split(f"@ theirs.toml {flags}"), root, program="rl", **options)


def refusal(text: str, flags: str = "", root: Any = RunConfig, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(text, flags, root, **options)
    return str(error.value)


SOURCE = '[[orchestrator.train.source]]\nname = "a"\n[orchestrator.train.source.env.taskset]\nid = "task"\n'
MULTI = '[deployment]\ntype = "multi_node"\nnum_train_nodes = 2\n[slurm]\njob_name = "x"\n'
TEACHER = 'teacher = { name = "t", base_url = "http://h:1/v1" }'
TAUGHT = {"samples": True, "base_url": "http://h:1/v1", "model": "t"}

RL: list[tuple[str, dict[str, Any]]] = [
    ("orchestrator.group_size = 4", {"orchestrator.rollouts_per_example": 4}),
    ("orchestrator.train.group_size = 4", {"orchestrator.rollouts_per_example": 4}),
    ("orchestrator.train.sampling.max_completion_tokens = 9", {"orchestrator.sampling.max_tokens": 9}),
    ("orchestrator.concurrency = { min_inflight = 1, max_inflight = 64 }", {"orchestrator.max_concurrent": 64}),
    ("orchestrator.token_batch_size = 9", {"orchestrator.token_batch_size": 9, "orchestrator.batch_size": None}),
    ("orchestrator.train.filter_zero_advantages = true", {"orchestrator.filters.zero_advantage": "mask"}),
    (SOURCE, {"orchestrator.env.0.id": "task", "orchestrator.env.0.name": "a", "orchestrator.env.0.args": {}}),
    (
        f"{SOURCE}level = 3\n[orchestrator.train.source.env.taskset.task]\nhard = true",
        {"orchestrator.env.0.args": {"level": 3, "task": {"hard": True}}},
    ),
    (f'{SOURCE}[orchestrator.train.source.env.agent.harness]\nid = "null"', {"orchestrator.env.0.args": {}}),
    (
        f'{SOURCE}[orchestrator.train.source.env.solver.harness]\nid = "bash"\nskills = ["x"]',
        {"orchestrator.env.0.args": {"solver": {"harness": {"id": "bash", "skills": ["x"]}}}},
    ),
    (f'{SOURCE}[orchestrator.train.source.env.agent.runtime]\ntype = "subprocess"', {"orchestrator.env.0.args": {}}),
    (
        f'{SOURCE}[orchestrator.train.source.env.agent.runtime]\ntype = "modal"',
        {"orchestrator.env.0.args": {"agent": {"runtime": {"type": "modal"}}}},
    ),
    (
        f"{SOURCE}[orchestrator.train.source.env.agent.timeout]\nrollout = 60",
        {"orchestrator.env.0.rollout_timeout_s": 60},
    ),
    (
        f"{SOURCE}[orchestrator.train.source.select]\nshuffle = true",
        {"orchestrator.env.0.args": {"select": {"shuffle": True}}},
    ),
    (
        '[[orchestrator.train.env]]\nratio = 2\ntaskset = { id = "t" }\nharness = { id = "bash" }',
        {
            "orchestrator.env.0.weight": 2,
            "orchestrator.env.0.id": "t",
            "orchestrator.env.0.args": {"agent": {"harness": {"id": "bash"}}},
        },
    ),
    (
        '[[orchestrator.eval.source]]\n[orchestrator.eval.source.env.taskset]\nid = "t"',
        {"orchestrator.eval.env.0.id": "t"},
    ),
    (
        "[orchestrator.eval]\nskip_first_step = true\nnum_examples = -1",
        {"orchestrator.eval.eval_base": False, "orchestrator.eval.num_examples": None},
    ),
    (
        "[orchestrator.eval]\ngroup_size = 4",
        {"orchestrator.eval.rollouts_per_example": 4, "orchestrator.eval.sampling.temperature": 1.0},
    ),
    ('[orchestrator.algo]\ntype = "max_rl"', {"orchestrator.advantage.type": "max_rl"}),
    (
        f'[orchestrator.algo]\ntype = "opd"\n{TEACHER}',
        {
            "orchestrator.teacher.base_url": "http://h:1/v1",
            "orchestrator.teacher.model": "t",
            "orchestrator.teacher.reward_weight": 0,
        },
    ),
    (
        SOURCE.replace('"a"', f'"a"\nalgo = {{ type = "sft", {TEACHER.replace("teacher", "sampling.source")} }}'),
        {f"orchestrator.env.0.teacher.{key}": value for key, value in TAUGHT.items()},
    ),
    ('[orchestrator.algo]\ntype = "echo"', {"orchestrator.echo.tool": 0.1}),
    (
        '[orchestrator.algo]\ntype = "echo"\nroles = { user = { alpha = 0.5 }, system = {} }',
        {"orchestrator.echo.user": 0.5, "orchestrator.echo.system": 0.1, "orchestrator.echo.tool": 0.0},
    ),
    (
        '[orchestrator.algo]\ntype = "opsd"\ndemo_key = "x"\ntemplate = "{demonstration}!"',
        {"orchestrator.teacher.demonstration": "x", "orchestrator.teacher.template": "{demonstration}!"},
    ),
    (
        "[[orchestrator.pre_batch_filters]]\ntype = 'zero_advantage'\nenforce = true",
        {"orchestrator.buffer.online_difficulty_filtering": True},
    ),
    (
        "[[orchestrator.post_batch_filters]]\ntype = 'repetition'\nenforce = true",
        {"orchestrator.filters.repetition": "mask"},
    ),
    (
        "orchestrator.buffer.easy_threshold = 0.8",
        {"orchestrator.buffer.pools.easy_threshold": 0.8, "orchestrator.buffer.pools.easy_weight": 0},
    ),
    ("[ckpt]\ninterval = 5\nkeep_last = 2", {"trainer.ckpt.interval": 5, "trainer.ckpt.keep_last": 2}),
    ("[resume]", {"resume": True, "trainer.ckpt.resume_step": None}),
    ("[resume]\nstep = 3", {"resume": False, "trainer.ckpt.resume_step": 3}),
    (
        '[monitors.wandb]\nproject = "p"\noffline = true\n[monitors.file]',
        {"wandb.project": "p", "wandb.mode": "offline"},
    ),
    ('[run]\nname = "n"\n[log]\nlevel = "DEBUG"', {"name": "n", "log_level": "debug"}),
    ("seq_len = 9\norchestrator.seq_len = 5\ntrainer.model.seq_len = 8", {"seq_len": 5}),
    ("trainer.model.seq_len = 8", {"seq_len": 8}),
    ("weight_broadcast.adapter_only = false", {"trainer.model.lora": None}),
    ("weight_broadcast.adapter_only = true", {"trainer.model.lora.sync": "adapter"}),
    (
        '[inference.vllm]\nmax_model_len = 9\nseed = 1\ntool_call_parser = "auto"\ntensor_parallel_size = 2',
        {"inference.model.max_model_len": 9, "inference.args": {"seed": 1}, "inference.parallel.tp": 2},
    ),
    ('inference.vllm.quantization = "fp8"', {"inference.args": {"quantization": "fp8_per_tensor"}}),
    (
        '[weight_broadcast]\ntype = "filesystem"\ntimeout = 5\nport = 6',
        {"weight_broadcast.type": "filesystem", "weight_broadcast.timeout_s": 5, "ports.weights": 6},
    ),
    (
        "[trainer.model]\nfused_lm_head_token_chunk_size = 64\nimpl = 'custom'\n[trainer.model.ac_offloading]",
        {"trainer.model.head_chunk": 64, "trainer.model.activation_offload": True},
    ),
    (
        "[trainer.optim]\nbetas1 = 0.5\nmax_norm = 'None'",
        {"trainer.optim.betas": [0.5, 0.999], "trainer.optim.max_norm": float("inf")},
    ),
    (
        "[trainer.scheduler]\ntype = 'linear'\ndecay_steps = 4",
        {"trainer.scheduler.type": "wsd", "trainer.scheduler.decay_steps": 4},
    ),
    ("[trainer.scheduler]\ntype = 'linear'", {"trainer.scheduler.type": "linear"}),
    (
        "[deployment]\n[trainer.scheduler]\ntype = 'linear'",
        {"trainer.scheduler.type": "wsd", "trainer.scheduler.decay_steps": 10, "trainer.scheduler.warmup_steps": 10},
    ),
    (
        "[ckpt]\n[trainer.scheduler]\ntype = 'linear'\ndecay_steps = 0",
        {"trainer.scheduler.type": "constant", "trainer.scheduler.decay_steps": None},
    ),
    (
        "[trainer.loss]\ntype = 'icepop'\nratio_low = 0.3",
        {"trainer.loss.type": "importance", "trainer.loss.ratio_high": 5.0},
    ),
    (
        "[ckpt]\n[trainer.loss]\nratio_low = 0.2\nratio_high = 6",
        {"trainer.loss.type": "importance", "trainer.loss.ratio_low": 0.2, "trainer.loss.ratio_high": 6},
    ),
    (
        "[trainer.loss]\ntype = 'ppo'\nratio_low = 0.7\nratio_high = 1.4",
        {"trainer.loss.clip_low": 0.3, "trainer.loss.clip_high": 0.4},
    ),
    (f"clean = true\n{MULTI}", {"trainer_gpus": None, "hosts.trainer": ["127.0.0.1"]}),
]


@pytest.mark.parametrize(("text", "ours"), RL, ids=[text[:60] for text, _ in RL])
def test_file_means_the_same_here(text, ours):
    config, _ = load(text)
    assert {key: value_at(config, key) for key in ours} == ours


@pytest.mark.parametrize(("keys", "is_said"), [("", True), ("eps = 0.1", False), ("ipo_threshold = 0.1", False)])
def test_ipo_without_a_threshold_says_whose_default_it_takes(keys, is_said):
    _, invocation = load(f"[trainer.loss]\ntype = 'ipo'\n{keys}")
    said = " ".join(str(line) for line in invocation.lines)
    assert ("2026-09-18" in said, "eps 0.3" in said) == (is_said, is_said)


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        ("--orchestrator.group-size 4", {"orchestrator.rollouts_per_example": 4}),
        ("--orchestrator.algo.type max_rl", {"orchestrator.advantage.type": "max_rl"}),
        ("--monitors.wandb.project p", {"wandb.project": "p"}),
        ("--no-monitors.file", {"wandb": None}),
        ("--ckpt.interval 3", {"trainer.ckpt.interval": 3}),
        ("--resume.step 3", {"trainer.ckpt.resume_step": 3}),
        ("--clean --resume", {"resume": True}),
        ("--inference.vllm.max-model-len 9 --inference.vllm.seed 3", {"inference.args": {"seed": 3}}),
        ("--trainer.optim.betas1 0.5", {"trainer.optim.betas": [0.5, 0.99]}),
        ("--orchestrator.train.source.0.ratio 3", {"orchestrator.env.0.weight": 3, "orchestrator.env.1.weight": 1}),
        (
            "--orchestrator.train.source.1.env.taskset.id z",
            {"orchestrator.env.0.id": "task", "orchestrator.env.1.id": "z"},
        ),
        ("--orchestrator.train.source.0.env.taskset.min-turns 3", {"orchestrator.env.0.args": {"min_turns": 3}}),
        ("--orchestrator.env.0.weight 3 --orchestrator.train.source.0.name b", {"orchestrator.env.0.weight": 3}),
    ],
)
def test_flag_means_the_same_here(flags, ours):
    second = SOURCE.replace('"task"', '"other"').replace('"a"', '"b"')
    config, _ = load(f"trainer.optim.betas2 = 0.99\n{SOURCE}{second}", flags)
    assert {key: value_at(config, key) for key in ours} == ours


@pytest.mark.parametrize(
    ("template", "flags", "said"),
    [
        ("{{ m.content }}", "", "keeps earlier thinking"),
        ("{{ m.content.split('</think>')[-1] }}", "", None),
        ("{{ m.content }}{% if keep %}{{ m.reasoning_content }}{% endif %}", "", None),
        ("{{ m.content.split('<|channel|>final')[-1] }}", "", None),  # a form that is not tried
        ("{{ m.content.split('</think>')[-1] }}", "--orchestrator.trajectory-strategy branching", "`branching`"),
    ],
)
def test_thinking_is_retained_if_the_configured_template_keeps_it(template, flags, said, tiny_model, tmp_path):
    """The model may be named by a flag, which comes after the file that asks for it."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(f"{{% for m in messages %}}{template}{{% endfor %}}")
    text, flags = 'renderer.thinking_retention = "all"', f"{flags} --model.name {model}"
    text = f"[orchestrator]\n{text}"
    if said is None:
        assert "thinking_retention" in refusal(text, flags)
    else:
        _, invocation = load(text, flags)
        assert said in invocation.without_effect


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ('[orchestrator.algo]\ntype = "echo"\nfilter.import_path = "m.f"', "orchestrator.algo", "alpha"),
        ('[orchestrator.algo]\ntype = "sft"', "orchestrator.algo", "sampling.source"),
        (
            '[orchestrator.train.algo]\ntype = "echo"\n[[orchestrator.env]]\nalgo = "grpo"',
            "orchestrator.env[0].algo",
            "each source",
        ),
        (
            "[orchestrator.renderer]\nthinking_retention = 'all'",
            "orchestrator.renderer.thinking_retention",
            "branching",
        ),
        ("[orchestrator.renderer]\nmax_width = 3", "orchestrator.renderer.max_width", "chat_template_kwargs"),
        ("trainer.model.quantization = { type = 'fp8' }", "trainer.model.quantization", "inference.args"),
        ("trainer.model.debug.num_layers = 2", "trainer.model.debug.num_layers", "Remove it"),
        ("trainer.data.fake.batch_size = 2", "trainer.data.fake", "sft --data fake"),
        ("trainer.max_concurrent_runs = 2", "trainer.max_concurrent_runs", "Start one for each"),
        ("orchestrator.client.base_url = ['http://h:1/v1']", "orchestrator.client.base_url", "hosts.inference"),
        ("ckpt.output_dir = 'x'", "ckpt.output_dir", "output_dir"),
        ("[[orchestrator.post_batch_filters]]\ntype = 'odd'", "orchestrator.post_batch_filters", "repetition"),
        ("orchestrator.buffer.easy_fraction = 0.1", "orchestrator.buffer.easy_fraction", "easy_weight"),
    ],
)
def test_key_without_counterpart_is_refused_by_its_name(text, key, nearest):
    said = refusal(text)
    assert f"theirs.toml: `{key} = " in said
    assert nearest in said


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (
            "[orchestrator.algo.length_penalty]\nnum_turns_weight = 0.2",
            {
                "orchestrator.advantage.type": "group_mean",
                "orchestrator.length_penalty.type": "group_linear",
                "orchestrator.length_penalty.num_turns_weight": 0.2,
            },
        ),
        (
            "[ckpt]\nskip_progress = true\n[trainer.ckpt]\nskip_optimizer = true",
            {"trainer.ckpt.resume_without": ["optimizer", "progress"]},
        ),
        ('resume.dir = "runs/a/checkpoints/step_50"', {"resume_from": "runs/a", "trainer.ckpt.resume_step": 50}),
        ('resume.dir = "runs/a"', {"resume_from": "runs/a"}),
        (
            '[trainer.loss]\ntype = "default"\ndppo_mask_low = 0.1',
            {
                "trainer.loss.type": "dppo_tv",
                "trainer.loss.kl_tau": 1e-3,
                "trainer.loss.max_importance_ratio": "inf",
                "trainer.loss.mask_low": 0.1,
            },
        ),
        (
            '[trainer.loss]\ntype = "ipo"\nipo_threshold = 0.2',
            {"trainer.loss.type": "ipo", "trainer.loss.kl_tau": 1e-3, "trainer.loss.eps": 0.2},
        ),
        (
            '[[orchestrator.train.source]]\ngroup_size = 2\nalgo = { type = "rae", decay = 0.5 }',
            {
                "orchestrator.env.0.rollouts_per_example": 2,
                "orchestrator.env.0.advantage.type": "rae",
                "orchestrator.env.0.advantage.decay": 0.5,
            },
        ),
        (
            "[[orchestrator.train.source]]\ncurriculum = { gates = { g = { type = 'advantage_range' } } }",
            {"orchestrator.env.0.buffer.online_difficulty_filtering": True},
        ),
        (
            "[[orchestrator.train.source]]\ncurriculum = { gates = { a = {}, b = { reject_max = 0.1 } } }",
            {
                "orchestrator.env.0.buffer.online_difficulty_filtering": True,
                "orchestrator.env.0.buffer.advantage_range": [0.0, 0.1],
            },
        ),
        (
            "[[orchestrator.eval.source]]\ngroup_size = 4\nskip_first_step = true\nnum_examples = 7",
            {
                "orchestrator.eval.env.0.rollouts_per_example": 4,
                "orchestrator.eval.env.0.sampling.temperature": 1.0,
                "orchestrator.eval.env.0.eval_base": False,
                "orchestrator.eval.env.0.num_examples": 7,
            },
        ),
    ],
)
def test_keys_are_given_as_a_source_a_loss_or_a_checkpoint_has_them(text, ours):
    found = translate(tomllib.loads(text), rows_for(RunConfig))
    assert {".".join(path): value for path, value in found.settings.items()} == ours
    assert (found.unknown, found.problems) == ([], [])


def test_gpus_of_a_file_count_where_there_are_some():
    text = "[deployment]\nnum_train_gpus = 2\nnum_infer_gpus = 6\n[trainer.model]\nattn = 'flash_attention_3'\n"
    with on_machine(Devices(cores=1)):
        config, invocation = load(text)
    assert (config.trainer_gpus, config.inference_gpus, config.trainer.model.attn) == (None, None, "sdpa")
    assert "no GPU" in invocation.without_effect
    with on_machine(GPUS):
        config, _ = load(text)
    assert (config.trainer_gpus, config.inference_gpus, config.trainer.model.attn) == (2, 6, "flash_attention_3")


SFT: list[tuple[str, dict[str, Any]]] = [
    (
        '[data]\nname = "o/d"\nseq_len = 64\nbatch_size = 4\nmicro_batch_size = 2',
        {"data": "o/d", "seq_len": 64, "batch_size": 4, "micro_batch_tokens": 128},
    ),
    (
        '[data]\nname = "o/d"\nsubsets = ["a", "b"]\nsplits = ["t"]',
        {"data": None, "source.0.subset": "a", "source.1.subset": "b", "source.1.split": "t"},
    ),
    ('[data]\ntype = "fake"\ninput_ids = "increasing"', {"data": "fake"}),
    ('[data]\ntype = "fake"\nlength = "variable"', {"data": "fake-of-any-length"}),
    ('[data]\nname = "o/d"\nloss_mask = { user = true }', {"loss_on": ["user", "assistant"]}),
    ('[[data.source]]\ndataset = "o/d"', {"source.0.data": "o/d"}),
    ('[val]\ninterval = 5\n[val.data]\nname = "o/v"', {"validation": "o/v", "validation_interval": 5}),
    (
        "[model]\nattn = 'auto'\nfull_offload = true\n[model.compile]",
        {"model.attn": "sdpa", "model.fsdp_cpu_offload": True},
    ),
    (
        "[ckpt]\ninterval = 2\n[resume]\nstep = 5\n[optim]\nlr = 0.0",
        {"ckpt.interval": 2, "ckpt.resume_step": 5, "optim.lr": 0},
    ),
    ('[renderer]\nname = "auto"\n[monitors.wandb]\nproject = "p"', {"wandb.project": "p"}),
    (
        "[eval]\ninterval = 25\nnum_examples = 32\nskip_first_step = true\n[eval.sampling]\nmax_completion_tokens = 9",
        {
            **{"eval.interval": 25, "eval.num_examples": 32, "eval.eval_base": False},
            **{"eval.sampling.max_tokens": 9, "eval.sampling.temperature": 1.0},
        },
    ),
    (
        '[[eval.source]]\nname = "n"\n[eval.source.env]\ntaskset.id = "t"\nagent.harness.id = "null"',
        {"eval.env.0.id": "t", "eval.env.0.name": "n"},
    ),
    (
        "[eval]\n[inference.vllm]\nmax_model_len = 64\n[deployment]\nnum_infer_gpus = 1",
        {"inference.model.max_model_len": 64},
    ),
]


@pytest.mark.parametrize(("text", "ours"), SFT, ids=[text[:60] for text, _ in SFT])
def test_supervised_file_means_the_same_here(text, ours):
    config, _ = load(text, root=SftConfig)
    assert {key: value_at(config, key) for key in ours} == ours


def test_files_of_single_processes_have_their_tables_at_the_top():
    orchestrator, _ = load(
        'batch_size = 8\ngroup_size = 4\nmax_steps = 3\n[model]\nname = "m"\n[renderer]\nname = "qwen3"\n[ckpt]\n'
        '[monitors.wandb]\nproject = "p"\n[train.sampling]\nmax_completion_tokens = 7\n'
        '[[train.source]]\n[train.source.env.taskset]\nid = "t"',
        section="orchestrator",
    )
    ours = {"max_steps": 3, "model.name": "m", "wandb.project": "p", "orchestrator.batch_size": 8}
    ours |= {
        "orchestrator.rollouts_per_example": 4,
        "orchestrator.sampling.max_tokens": 7,
        "orchestrator.env.0.id": "t",
    }
    assert {key: value_at(orchestrator, key) for key in ours} == ours
    trainer, _ = load("[model]\nseq_len = 9\nimpl = 'hf'\n[optim]\nlr = 0.5\n[ckpt]\ninterval = 1", section="trainer")
    assert (trainer.seq_len, trainer.trainer.optim.lr, trainer.trainer.ckpt.interval) == (9, 0.5, 1)
    inference, _ = load("[vllm]\nmax_model_len = 9\n[server]\nport = 1\n[deployment]", section="inference")
    assert (inference.inference.model.max_model_len, inference.inference.server.port) == (9, 1)


def test_evaluation_file_names_its_server():
    text = 'model = "m"\n[eval.client]\nbase_url = "http://h/v1"\n[eval.concurrency]\nmax_inflight = 3\n'
    config, _ = load(f'{text}[[eval.source]]\n[eval.source.env.taskset]\nid = "t"', root=EvalConfig)
    assert (config.model.name, config.client.base_url, config.max_concurrent) == ("m", "http://h/v1", 3)
    assert load(text, "--model other", root=EvalConfig)[0].model.name == "other"
    assert config.env[0].id == "t"


@pytest.mark.parametrize("root", [RunConfig, EvalConfig])
def test_source_of_an_evaluation_keeps_its_own_temperature(root):
    text = "group_size = 4\n{}[TABLE.env.taskset]\nid = 't'\n"
    warm = text.format("[TABLE.sampling]\ntemperature = 0.7\n")
    table = "orchestrator.eval.source" if root is RunConfig else "eval.source"
    config, _ = load(
        f"[[TABLE]]\n{warm}[[TABLE]]\n{text.format('')}".replace("TABLE", table).replace("= 4", "= 3", 1), root=root
    )
    envs = config.orchestrator.eval.env if root is RunConfig else config.env
    assert [(each.rollouts_per_example, each.sampling.temperature) for each in envs] == [(3, 0.7), (4, 1.0)]


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("orchestrator.groop_size = 4", "", "unknown key `orchestrator.groop_size` ... `orchestrator.group_size`"),
        ("", "--orchestrator.groop-size 4", "`--orchestrator.groop-size` ... `--orchestrator.group-size`"),
        ("[monitors.wanb]\nproject = 'p'", "", "`monitors.wanb` ... `monitors.wandb`"),
        (SOURCE.replace("taskset", "tasket"), "", "source[0].id` is missing ... source.env.taskset]` has it"),
        ("monitors.wandb.nmae = 'p'", "", "`monitors.wandb.nmae` ... `monitors.wandb.name`"),
        ("", "--orchestrator.train.sampling.max-completion-token 4", "`--orchestrator.sampling.max-completion-tokens`"),
        (f"{SOURCE}[orchestrator.train.source.smapling]\n", "", "`orchestrator.train.source[0].smapling`"),
        ("orchestrator.group_size = 'many'", "", '`orchestrator.group_size = "many"` - expected integer'),
        ("", "--orchestrator.group-size many", "`--orchestrator.group-size many` - expected integer"),
        (f"{SOURCE.replace('name', 'ratio = -1 #')}", "", "`orchestrator.train.source[0].ratio = -1` - expected"),
        (
            "ckpt.interval = 3\ntrainer.ckpt.interval = 4",
            "",
            "`ckpt.interval = 3` and `trainer.ckpt.interval = 4` are two names",
        ),
        ("orchestrator.group_size = 3\norchestrator.rollouts_per_example = 4", "", "two names of one key"),
    ],
)
def test_a_mistake_is_named_in_the_keys_of_the_user(text, flags, words):
    said = refusal(text, flags)
    assert [part for part in words.split(" ... ") if part not in said] == []


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        (
            "orchestrator.batch_size = 8\norchestrator.group_size = 3",
            "",
            "is `orchestrator.group_size` in theirs.toml.",
        ),
        ("orchestrator.batch_size = 8", "--orchestrator.group-size 3", "is `--orchestrator.group-size` here."),
    ],
)
def test_a_rule_that_is_broken_names_the_key_of_the_user(text, flags, words):
    config, invocation = load(f"{text}\n{SOURCE}", flags)
    resolved = resolve(config, Devices(cores=1))
    with pytest.raises(ConfigError, match="batch_size must be divisible") as error, invocation.their_keys_named():
        check(resolved, Devices(cores=1))
    assert f"`orchestrator.rollouts_per_example` {words}" in str(error.value)


def test_every_key_of_a_file_has_a_line():
    text = 'max_steps = 3\nclean = true\n[run]\nname = "n"\n[orchestrator]\ngroup_size = 4\n[monitors.prime]\n'
    _, invocation = load(text)
    assert [str(line).partition(" -> ")[0] for line in invocation.lines] == [
        *("max_steps = 3", "clean = true", 'run.name = "n"', "orchestrator.group_size = 4", "monitors.prime = {}"),
    ]
    idle = [".".join(line.theirs) for line in invocation.lines if not line.has_effect]
    assert idle == ["clean", "monitors.prime"]
    assert all(f"`{key} = " in invocation.without_effect for key in idle)
    assert "group_size" not in invocation.without_effect


@pytest.mark.parametrize("root", [RunConfig, SftConfig, EvalConfig])
def test_a_row_leads_to_a_key_that_exists(root):
    named = [row.ours.replace("[]", "") for row in rows_for(root) if isinstance(row.ours, str)]
    if root is SftConfig:  # has the trainer's keys at its top
        named = [key.removeprefix("trainer.") for key in named]
    theirs = {row.theirs.replace("[]", "") for row in rows_for(root)}
    # A row may lead to a key that has a row itself, or into a table that takes any key.
    translated = {*theirs, *(table for key in theirs for table in tables_of(key))}
    lost = [key for key in named if not exists(root, key) and not {key, *tables_of(key)} & translated]
    assert lost == []


def exists(root: Any, key: str) -> bool:
    path = tuple(key.split("."))
    found = [find(root, path[:depth]) for depth in range(1, len(path) + 1)]
    return found[-1] is not None or any(field is not None and field.kind == "table" for field in found)


def tables_of(key: str) -> set[str]:
    parts = key.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts))}


def test_start_of_a_run_names_the_keys_without_effect(capsys):
    Path("theirs.toml").write_text(f"clean = true\n[log]\ninterval = 3\n{SOURCE}")
    with pytest.raises(SystemExit):
        load_config(["@", "theirs.toml", "--print-config"], RunConfig, program="rl")
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["orchestrator"]["env"] == [{"name": "a", "id": "task"}]
    assert "# clean = true -> no effect: files of an earlier run are moved aside\n" in printed
    _, invocation = load_config(["@", "theirs.toml"], RunConfig, program="rl")
    note_translation(invocation)
    said = capsys.readouterr().err
    assert "`clean = true` (files of an earlier run are moved aside); `log.interval = 3`" in said
    assert "our defaults" in said
