"""A source's own tables go over the run's, key by key, and are judged by the same rules."""

import shlex
from pathlib import Path

import pytest

from support.runs.resolved_runs import CPU, prefixed, refusals, resolved
from trireme.base.errors import ConfigError
from trireme.config.files import ProcessName, read_run, write_process_files, write_run
from trireme.config.load import load_run_config
from trireme.config.orchestrator import Advantage, Buffer, LengthPenalty, Teacher
from trireme.config.resolve import resolve
from trireme.config.rules.check import check
from trireme.config.run import RunConfig
from trireme.config.sampling import Sampling
from trireme.config.section import merged

pytestmark = pytest.mark.usefixtures("here")

RUN = """
seq_len = 100
trainer.loss = { type = "grpo", clip_high = 0.3 }

[orchestrator]
batch_size = 30
rollouts_per_example = 8
sampling = { temperature = 0.7, max_tokens = 40, extra_body = { ignore_eos = true } }
advantage = { type = "ema", clip = 2.0 }
filters = { truncated = "mask" }
teacher = { base_url = "http://t:1/v1", weight = 0.5 }
buffer = { difficulty_threshold = 0.1, use_difficulty_filtering = true, pools = { easy_weight = 0.1 } }

[[orchestrator.env]]
id = "plain"

[[orchestrator.env]]
id = "own"
rollouts_per_example = 6
sampling = { max_tokens = 20, extra_body = { stop_token_ids = [7] } }
advantage = { type = "rae" }
filters = { repetition = "drop" }
teacher = { weight = 0 }
buffer = { pools = { hard_weight = 0.0 } }
loss = { clip_high = 0.5, normalize = "constant" }

[[orchestrator.env]]
id = "other"
advantage = { clip = 1.0 }
loss = { type = "importance" }
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "run.toml").write_text(RUN)
    return resolved(f"@ {tmp_path / 'run.toml'}")


def test_a_source_takes_every_key_that_it_does_not_give_from_the_run(config: RunConfig):
    run, own = config.orchestrator, config.of("own").orchestrator
    body = {"ignore_eos": True, "stop_token_ids": [7]}
    assert own.sampling == Sampling(temperature=0.7, max_tokens=20, extra_body=body)
    assert (own.filters.truncated, own.filters.repetition, own.rollouts_per_example) == ("mask", "drop", 6)
    assert own.buffer.pools is not None
    assert (own.buffer.difficulty_threshold, own.buffer.pools.easy_weight, own.buffer.pools.hard_weight) == (
        0.1,
        0.1,
        0.0,
    )
    assert own.teacher is None  # switched off
    assert config.of("other").orchestrator.advantage == Advantage(type="ema", clip=1.0)
    assert own.advantage == Advantage(type="rae")  # one of another type stands alone
    for unchanged in (config.of("plain"), config.of("of no such name")):
        assert unchanged.orchestrator == run
        assert unchanged.trainer == config.trainer


def test_a_loss_of_a_source_is_resolved_over_the_runs(config: RunConfig):
    own, other = config.of("own").trainer.loss, config.of("other").trainer.loss
    assert (own.type, own.clip_low, own.clip_high) == ("grpo", 0.2, 0.5)
    assert (own.normalize, own.normalize_length) == ("constant", 20)  # by its own `max_tokens`
    assert (other.type, other.surrogate, other.normalize, other.ratio_high) == (
        "importance",
        "importance",
        "token",
        8.0,
    )
    assert [*config.losses] == ["", "own", "other"]


def test_a_written_run_with_sources_resolves_to_itself(config: RunConfig, tmp_path: Path):
    write_run(config, tmp_path / "run.json")
    assert read_run(RunConfig, tmp_path / "run.json") == config == resolve(config, CPU)
    again = load_run_config(["--run", str(tmp_path / "run.json")], program="rl")[0]
    assert again.of("own") == config.of("own")
    # what a source leaves to the run stays open in the file, so that a later change of the run's key reaches it
    assert config.orchestrator.env[2].sampling is None


@pytest.mark.parametrize("process", ["trainer", "orchestrator"])
def test_a_process_started_alone_has_what_it_needs_of_sources(process: ProcessName, tmp_path: Path):
    """Also what a source switches off: its pools, and the bounds of a correction that it does without."""
    loss = 'trainer.loss = { type = "icepop" }'
    text = RUN.replace('trainer.loss = { type = "grpo", clip_high = 0.3 }', loss)
    text = text.replace('normalize = "constant"', 'correction = "none"').replace("{ hard_weight = 0.0 }", '"none"')
    (tmp_path / "run.toml").write_text(text)
    config = resolved(f"@ {tmp_path / 'run.toml'}")
    write_process_files(config, tmp_path)
    alone = resolved(f"@ {tmp_path / process}.toml", section=process)
    assert config.of("own").orchestrator.buffer.pools is None
    assert config.of("own").trainer.loss.correction_low is None
    check(config, CPU)  # refuses none of these keys
    for name in ("plain", "own", "other"):
        if process == "trainer":
            assert alone.of(name).trainer.loss == config.of(name).trainer.loss
        else:
            assert alone.of(name).orchestrator == config.of(name).orchestrator
    assert [*alone.losses] == [*config.losses]


def test_an_environment_of_an_evaluation_takes_what_it_leaves_open():
    given = "--orchestrator.env.0.id a --orchestrator.sampling.max-tokens 9 --orchestrator.eval.interval 4"
    own = '{id = "b", interval = "none", num_examples = "none", sampling = {top_k = 3}}'
    given += f" --orchestrator.eval.eval-base false --orchestrator.eval.env '[{{id = \"a\"}}, {own}]'"
    evaluation = resolved(given).orchestrator.eval
    assert evaluation is not None
    first, second = evaluation.of("a"), evaluation.of("b")
    assert (first.interval, first.num_examples, first.eval_base) == (4, 100, False)
    assert (second.interval, second.num_examples, second.eval_base) == (None, None, False)
    assert (first.sampling.top_k, second.sampling.top_k) == (None, 3)
    assert second.sampling.max_tokens == first.sampling.max_tokens == 9
    assert second.sampling.temperature == 0
    assert evaluation.of("no such name") == evaluation


def test_merging_again_changes_nothing():
    pairs = [
        (Buffer(pools={"easy_weight": 0.3}), Buffer(pools={"memory": 0.1})),
        (LengthPenalty(weight=2.0), LengthPenalty(type="linear")),
        (Teacher(base_url="x", weight=0.25), Teacher(weight=0.0)),
        (None, Sampling(top_k=4)),
    ]
    for table, own in pairs:
        once = merged(table, own)
        assert merged(table, once) == once == merged(once, once)


def test_groups_per_batch_are_counted_by_the_share_of_each_source(config: RunConfig):
    assert config.num_groups == round(30 / ((8 + 6 + 8) / 3))


TAUGHT_RUN = "--orchestrator.teacher.base-url http://t:1/v1 --orchestrator.teacher.samples"
TAUGHT = "--orchestrator.env.0.teacher.base-url http://t:1/v1 --orchestrator.env.0.teacher.samples"
BATCH = "--orchestrator.batch-size 12 --orchestrator.env.0.rollouts-per-example"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{BATCH} 13 --orchestrator.env.1.rollouts-per-example 4", "12 with groups of 13 rollouts of environment 'a'"),
        (f"{BATCH} 5 --orchestrator.env.1.rollouts-per-example 5", "must be divisible ... 12 % 5 = 2"),
        (f"{BATCH} 4 --orchestrator.env.1.rollouts-per-example 6", ""),
        ("--orchestrator.env.0.teacher.weight 2", "of its own, `[[orchestrator.env]]` \"a\" ... without `base_url`"),
        ("--orchestrator.teacher.weight 2", "`[orchestrator.teacher]` without `base_url`"),
        (f"{TAUGHT} --orchestrator.env.0.loss.type grpo", 'orchestrator.env["a"].loss` (grpo) with `teacher.samples`'),
        (f"{TAUGHT} --trainer.loss.type grpo", ""),  # of the other source
        (f"{TAUGHT_RUN} --trainer.loss.type grpo", "`trainer.loss` (grpo) with `teacher.samples`"),
        (f"{TAUGHT} --orchestrator.echo.tool 1", '"a": `[orchestrator.echo]` with `teacher.samples`'),
        (f"{TAUGHT} --orchestrator.env.0.teacher.demonstration answer", "samples = True"),
        ("--orchestrator.echo.tool 1 --orchestrator.trajectory-strategy branching", '"branching"'),
        ("--orchestrator.env.1.advantage.type hierarchical_grpo", "\"b\" ... with episode_agents = []"),
        ("--orchestrator.env.1.sampling.extra-body.top_p 1", 'orchestrator.env["b"].sampling'),
        ("--orchestrator.env.1.loss.clip-low 0.1", 'orchestrator.env["b"].loss.clip_low'),
        ("--orchestrator.env.1.loss.type custom", 'orchestrator.env["b"].loss'),
        ("--orchestrator.eval.env '[{id = \"e\", rollouts_per_example = 2}]'", "eval.sampling.temperature = 0"),
    ],
)  # fmt: skip
def test_what_a_source_cannot_have_is_refused_with_its_name(flags: str, words: str):
    found = refusals(flags, words) if words else refusals(flags)
    assert len(found) == bool(words), found


def test_one_reference_model_cannot_be_updated_at_two_times():
    own = prefixed("orchestrator.env.0.loss", "--beta 0.1 --reference-update-every")
    assert refusals(f"{own} 5", "reference_update_every") == []
    assert refusals(f"{own} 5 --trainer.loss.beta 0.1", 'differs: `trainer.loss` never, `orchestrator.env["a"].loss` 5')


def test_a_misspelt_key_of_a_source_is_answered_by_its_own_table():
    words = shlex.split("--orchestrator.env.0.id x --orchestrator.env.0.sampling.max-token 5")
    with pytest.raises(ConfigError, match=r"orchestrator\.env\.0\.sampling\.max-tokens"):
        load_run_config(words, program="rl")
