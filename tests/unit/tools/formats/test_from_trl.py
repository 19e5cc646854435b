"""Scripts of TRL become runs: each construct is read or named by its line, and nothing of a script is run."""

import asyncio
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.runs.resolved_runs import CPU
from trireme.base.errors import ConfigError
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules.check import problems
from trireme.tools.formats.from_trl import command
from trireme_worker.loading import load_adapter
from trireme_worker.plain import PlainAdapter

SCRIPT = """\
import random
import re
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

open("was_run", "w").write("yes")

RIGHT = re.compile("b+")


def longer(completions, **columns):
    # a comment that stays
    return [float(len(text)) for text in completions]


async def right(completions, answer, **columns):
    return [float(bool(RIGHT.search(text)) and text == wanted) for text, wanted in zip(completions, answer)]


def unused():
    raise RuntimeError


dataset = Dataset.from_list([{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}])
dataset = dataset.map(lambda row: {"prompt": row["question"] * 2})
config = GRPOConfig(output_dir="outputs/mine", max_steps=5, per_device_train_batch_size=8, reward_weights=[1.0, 2.0])
trainer = GRPOTrainer("owner/model", [longer, right], args=config, train_dataset=dataset)
trainer.train()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(script: str, *words: str) -> dict[str, Any]:
    """Translate a script, and return the run that was written."""
    Path("mine.py").write_text(script)
    assert command(["mine.py", "--out", "out", *words]) == 0
    assert not Path("was_run").exists()
    return tomllib.loads(next(Path("out").glob("*.toml")).read_text())


def refusal(script: str, *words: str) -> str:
    Path("mine.py").write_text(script)
    with pytest.raises(ConfigError) as caught:
        command(["mine.py", "--out", "out", *words])
    assert not Path("out").exists()
    return str(caught.value)


def trainer(config: str = "max_steps=5", before: str = "", more: str = "", kind: str = "GRPO") -> str:
    """Return a short script."""
    rewards = "reward_funcs=len, " if kind == "GRPO" else ""
    return (
        f"from trl import *\n{before}\n"
        f"trainer = {kind}Trainer(model='m', {rewards}args={kind}Config({config}), train_dataset=[], {more})\n"
    )


def load_environment(name: str = "environment") -> Any:
    spec = importlib.util.spec_from_file_location("carried", f"out/{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_run_that_is_written_would_start():
    table = run(SCRIPT)
    assert table["max_steps"] == 5
    assert (table["output_dir"], table["name"]) == ("outputs", "mine")
    config = resolve(load_run_config(["@", "out/rl.toml"], program="rl")[0], CPU)
    assert problems(config, CPU) == []
    assert config.synchronous


def test_carried_functions_score_as_they_would_there():
    run(SCRIPT)
    made = load_environment().load_environment()
    assert [row["prompt"] for row in made["dataset"]] == ["aa", "cc"]
    row = made["dataset"][0]
    found = asyncio.run(made["reward"](["b", "bbb"], [[], []], [row, row]))
    assert [each["reward"] for each in found] == [1 + 2 * 1, 3 + 2 * 0]


def test_worker_takes_the_file_that_was_written():
    (environment,) = run(SCRIPT)["orchestrator"]["env"]
    adapter = load_adapter("file", str(Path(environment["id"]).resolve()), args={})
    assert isinstance(adapter, PlainAdapter)
    assert (len(adapter.train), adapter.group_rewards) == (2, True)


def test_only_what_is_needed_is_carried_as_it_is_written():
    run(SCRIPT)
    text = Path("out/environment.py").read_text()
    assert "# a comment that stays" in text
    assert "import re" in text
    assert not any(word in text for word in ("import random", "unused", "was_run", "GRPOConfig", "GRPOTrainer"))


@pytest.mark.parametrize(
    ("before", "config"),
    [
        ("LR = 3e-6", "learning_rate=LR"),
        ("LR: float = 3e-6", "learning_rate=LR"),
        ("LR, OTHER = 3e-6, 2", "learning_rate=LR"),
        ("BASE = 1e-6", "learning_rate=3 * BASE"),
        ("more = {'learning_rate': 3e-6}", "**more"),
        ("more = dict(learning_rate=3e-6)", "**more, **{'beta': 0.0}"),
        ("sizes = {'small': [3e-6]}", "learning_rate=sizes['small'][0]"),
        ("name = 'owner/3e-6'", "learning_rate=float(name.split('/')[-1])"),
        ("given = None", "learning_rate=given or 3e-6"),
        ("given = True", "learning_rate=given and 3e-6"),
        ("is_large = 'x' in ['y']", "learning_rate=1e-3 if is_large else 3e-6"),
    ],
)
def test_values_are_read_through_names(before: str, config: str):
    assert run(trainer(f"max_steps=5, {config}", before))["trainer"]["optim"]["lr"] == pytest.approx(3e-6)


def test_attribute_set_behind_the_configuration_counts():
    script = "from trl import *\nconfig = GRPOConfig(max_steps=5)\nconfig.beta = 0.04\n"
    script += "GRPOTrainer(model='m', reward_funcs=len, args=config, train_dataset=[])"
    assert run(script)["trainer"]["loss"]["beta"] == 0.04


@pytest.mark.parametrize("given", [[], ["--lr", "3e-6"]])
def test_argparse_of_the_script_reads_its_words(given: list[str]):
    before = "import argparse\nparser = argparse.ArgumentParser()\n"
    before += "parser.add_argument('--lr', type=float, default=2e-6, help='x')\n"
    before += "parser.add_argument('--fast', action='store_true')\nargs = parser.parse_args()"
    table = run(trainer("max_steps=5, learning_rate=args.lr", before), *(["--", *given] if given else []))
    assert table["trainer"]["optim"]["lr"] == (3e-6 if given else 2e-6)


def test_words_that_the_script_does_not_take_are_refused(capsys: pytest.CaptureFixture[str]):
    before = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float)\nargs = p.parse_args()"
    found = refusal(trainer("max_steps=5, learning_rate=args.lr", before), "--", "--unheard-of", "3")
    assert "unrecognized arguments: --unheard-of 3" in found
    assert capsys.readouterr().err == ""


def test_argument_with_a_type_of_the_script_is_not_guessed():
    before = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=rate, default='1')\n"
    assert "rate('1')" in refusal(trainer("max_steps=5, learning_rate=args.lr", f"{before}args = p.parse_args()"))


def test_parser_inside_of_a_function_is_read():
    before = "import argparse\ndef read():\n    p = argparse.ArgumentParser()\n"
    before += "    p.add_argument('--lr', type=float, default=2e-6)\n    return p.parse_args()\nargs = read()"
    assert run(trainer("max_steps=5, learning_rate=args.lr", before))["trainer"]["optim"]["lr"] == 2e-6


def test_key_without_effect_need_not_be_known():
    assert run(trainer("max_steps=5, hub_model_id=input(), logging_steps=f()"))["max_steps"] == 5


def test_trl_parser_reads_the_words_of_a_script():
    script = """\
from dataclasses import dataclass, field
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

@dataclass
class Mine(ScriptArguments):
    column: str = field(default="text", metadata={"help": "x"})

def reward(completions, **columns):
    return [0.0 for _ in completions]

def main(script_args, training_args, model_args):
    data = load_dataset(script_args.dataset_name, split=script_args.dataset_train_split)
    data = data.rename_column(script_args.column, "prompt")
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, reward_funcs=reward, args=training_args,
        train_dataset=data, peft_config=get_peft_config(model_args),
    )
    trainer.train()

if __name__ == "__main__":
    parser = TrlParser((Mine, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
"""
    words = "--dataset_name owner/data --model_name_or_path owner/model --learning_rate 1e-5 --use_peft --lora_r 4"
    table = run(script, "--num-examples", "16", "--", *words.split())
    assert table["model"]["name"] == "owner/model"
    assert table["trainer"]["optim"]["lr"] == 1e-5
    assert table["trainer"]["model"]["lora"]["rank"] == 4
    assert table["max_steps"] == 16 * 3
    text = Path("out/environment.py").read_text()
    assert "'dataset_name': 'owner/data'" in text
    assert "'column': 'text'" in text
    assert not any(word in text for word in ("TrlParser", "parse_args", "GRPOConfig"))


def test_lora_config_has_the_defaults_of_peft():
    more = "peft_config=LoraConfig(lora_alpha=64, target_modules=['q_proj'], task_type='CAUSAL_LM')"
    lora = run(trainer(more=more))["trainer"]["model"]["lora"]
    assert lora == {"rank": 8, "alpha": 64, "dropout": 0.0, "target_modules": ["q_proj"]}


def test_model_that_is_loaded_gives_its_name():
    before = "import torch\nmodel = AutoModelForCausalLM.from_pretrained('owner/m', dtype=torch.bfloat16)"
    script = f"from trl import *\n{before}\n"
    script += "GRPOTrainer(model, len, GRPOConfig(max_steps=5), train_dataset=[], processing_class=None)"
    table = run(script)
    assert table["model"]["name"] == "owner/m"
    assert table["trainer"]["model"]["optimization_dtype"] == "bfloat16"


def test_processes_of_the_launch_multiply_the_batch():
    assert run(trainer(), "--num-processes", "4")["orchestrator"]["batch_size"] == 32


def test_neighbour_of_the_script_can_be_imported(folder: Path):
    (folder / "neighbour.py").write_text("def reward(completions, **columns):\n    return [2.0 for _ in completions]\n")
    script = "from trl import *\nfrom neighbour import reward\n"
    script += "rows = []\nrows.append({'prompt': 'a'})\nfor each in 'bc':\n    rows.append({'prompt': each})\n"
    run(script + "GRPOTrainer('m', reward, GRPOConfig(max_steps=5), rows)")
    made = load_environment().load_environment()
    assert [row["prompt"] for row in made["dataset"]] == ["a", "b", "c"]
    assert asyncio.run(made["reward"](["x"], [[]], made["dataset"][:1]))[0]["reward"] == 2.0


def test_package_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]):
    before = (
        "from unheard_of_package import grade as reward\nfrom trl.rewards import think_format_reward, accuracy_reward"
    )
    more = "eval_dataset=None"
    script = trainer(before=before, more=more).replace("=len", "=[reward, think_format_reward]")
    run(script)
    assert "imports unheard_of_package, not installed here" in capsys.readouterr().out
    assert "from trireme_worker.trl_rewards import think_format_reward" in Path("out/environment.py").read_text()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (trainer("max_steps=5, learning_rate=f()", "def f(): return 1"), "line 3.*learning_rate=VALUE"),
        (trainer("**vars(args)", "args = 1"), r"line 3: `\*\*vars\(args\)`.*one by one"),
        (trainer("max_steps=5, learning_rate=LR", "LR = 1\nLR = 2"), r"several places \(lines 2, 3\)"),
        (
            trainer("max_steps=5, **m", "m = {'beta': 0.1}\nm['beta'] = 0.2"),
            r"line 4: `\*\*m`: is set at several places \(lines 2, 3\)",
        ),
        (trainer("max_steps=5, **m", "m = {}\nif input(): m.update(beta=0.2)"), r"several places \(lines 2, 3\)"),
        (trainer("max_steps=5, beta=B", "B = 1\nB += 1"), r"several places \(lines 2, 3\)"),
        (
            "from trl import *\nc = GRPOConfig(max_steps=5)\nif input():\n    c.beta = 0.1\n"
            "GRPOTrainer('m', len, c, train_dataset=[])",
            "line 4: `c.beta` is set inside",
        ),
        ("class A:\n    def f(self):\n        GRPOTrainer('m', len)", "line 3: the trainer is made inside of a class"),
        (trainer("max_steps=5, beta=B", "for B in range(3): pass"), "line 3.*`for B in"),
        (trainer("max_steps=5, beta=B", "if input(): B = 1"), "line 3.*`if input"),
        (trainer("max_steps=5, beta=missing"), "line 3: `beta = missing`: is not defined"),
        (trainer("max_steps=5, beta=os.environ['B']", "import os"), "line 3.*beta=VALUE"),
        (trainer("max_steps=5, top_entropy_quantile=0.2"), "top_entropy_quantile"),
        (trainer("learning_rate=1e-6"), "--num-examples"),
        (trainer(more="tools=[print]"), "line 3: `tools`"),
        (trainer(more="rollout_func=print"), "line 3: `rollout_func`"),
        (trainer(more="optimizers=(a, b)"), r"\[trainer.optim\]"),
        (trainer().replace("=len", "='owner/reward'"), "reward model"),
        (trainer(before="def f(completion_ids): pass").replace("=len", "=f"), "line 2: `f` asks for `completion_ids`"),
        (trainer().replace("=len", "=[len, get_soft_overlong_punishment(9, 3)]"), r"\[orchestrator.length_penalty\]"),
        (trainer().replace("=len", "=unheard_of"), "`unheard_of`, which is not defined"),
        (trainer(more="peft_config=make()"), "LoraConfig"),
        (trainer() + trainer(), "2 calls"),
        ("DPOTrainer()", "DPOTrainer"),
        ("class Mine(GRPOTrainer): pass\nMine()", "subclasses"),
        ("def f(:", "not valid Python"),
    ],
)
def test_what_cannot_be_read_or_had_is_named(script: str, words: str):
    assert re.search(words, found := refusal(script)), found


def test_edited_files_are_not_overwritten_unless_asked():
    run(trainer())
    Path("out/environment.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"out/environment\.py exists"):
        command(["mine.py", "--out", "out"])
    assert Path("out/environment.py").read_text() == "mine"
    run(trainer(), "--overwrite")
    assert Path("out/environment.py").read_text() != "mine"


def test_typed_value_stands_for_one_that_cannot_be_read():
    script = trainer("max_steps=5, learning_rate=f()", "def f(): return 1")
    assert run(script, "--set", "learning_rate=1e-5")["trainer"]["optim"]["lr"] == 1e-5


def test_all_problems_are_shown_behind_the_table(capsys: pytest.CaptureFixture[str]):
    found = refusal(trainer("learning_rate=1e-6, fp16=True, beta=missing"))
    assert all(word in found for word in ("3 problems", "fp16", "missing", "num-examples"))
    assert "learning_rate = 1e-06 -> trainer.optim.lr = 1e-06" in capsys.readouterr().out


def test_supervised_script_becomes_a_run_of_sft():
    before = "rows = [{'text': 'a b'}, {'messages': [{'role': 'user', 'content': '?'}]}]"
    script = trainer("max_length=64, learning_rate=1e-4", before, kind="SFT").replace(
        "train_dataset=[]", "train_dataset=rows"
    )
    table = run(script)
    assert (table["seq_len"], table["optim"]["lr"], table["num_epochs"], table["data"]) == (
        64,
        1e-4,
        3.0,
        "out/data.py",
    )
    assert load_environment("data").conversations() == [
        {"prompt": "", "completion": "a b"},
        {"messages": [{"role": "user", "content": "?"}]},
    ]
