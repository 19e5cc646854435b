"""`trireme submit`: from a file in any format to what a cluster is given, with a scheduler that only takes notes."""

import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve, updated
from trireme.config.rules.check import problems
from trireme.config.run import RunConfig
from trireme.tools.cluster.job import find_submission, read_env_files
from trireme.tools.cluster.nodes import ClusterPlan, plan_nodes
from trireme.tools.cluster.submit import command as submit

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "models/reverse-text-tiny")

COMMON = "max_steps = 7\nbatch_size = 16\nrollouts_per_example = 8\nsampling.max_tokens = 12\n"
FORMATS = {
    "ours": f'max_steps = 7\nmodel.name = "{MODEL}"\n[orchestrator]\nbatch_size = 16\nrollouts_per_example = 8\n'
    'sampling.max_tokens = 12\nenv = [{ id = "reverse-text" }]\n',
    "hosted": f'model = "{MODEL}"\n{COMMON}[[env]]\nid = "reverse-text"\n',
    "flat": f'model_name = "{MODEL}"\nnum_gpus = 16\n{COMMON}[env]\nid = "reverse-text"\n',
}

SBATCH = """#!/bin/bash
echo "$*" >>{0}/words
/bin/cat >{0}/given
[ "$1" != --test-only ] || echo "sbatch: Job 7 to start at noon" >&2
[ "$1" != --parsable ] || {{ echo "sbatch: warning: no --mem" >&2; echo "7;tiny"; }}
"""


@pytest.fixture
def folder(here, monkeypatch):
    for name, text in FORMATS.items():
        Path(f"{name}.toml").write_text(text)
    Path("environments").symlink_to(ROOT / "environments")
    (sbatch := here / "bin" / "sbatch").parent.mkdir()
    sbatch.write_text(SBATCH.format(here))
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent))
    return here


MACHINE = Devices(gpus=tuple("01234567"), cores=8)
SPREAD = ["--nodes", "2", "--gpus-per-node", "8"]


def submitted(run: str) -> Path:
    return find_submission(Path(run)).folder


def loaded(file: Path, *flags: str) -> RunConfig:
    return load_run_config(["@", str(file), *flags], program="rl")[0]


def test_one_machine_gets_exactly_what_was_typed(folder):
    flags = ["--trainer.loss.type", "grpo", "--trainer.model.lora.rank", "8", "--orchestrator.sampling.top-p", "0.9"]
    submit(["ours.toml", "--name", "x", "--gpus-per-node", "8", *flags])
    there = loaded(submitted("outputs/x") / "run.toml")
    here = loaded(folder / "ours.toml", "--name", "x", "--output-dir", str(folder / "outputs"), *flags)
    assert there.model_dump(exclude_unset=True) == here.model_dump(exclude_unset=True) | {"device": "cuda"}
    assert problems(resolve(there, MACHINE), MACHINE) == []


def test_every_process_can_load_what_its_machine_is_given(folder):
    submit(["flat.toml", "--name", "x", *SPREAD])
    script = (submitted("outputs/x") / "node.sh").read_text().splitlines()
    (hosts,) = (line for line in script if line.startswith("hosts="))
    shell = f'{hosts}; printf "%s\\n" "${{hosts[@]}}"'
    addresses = subprocess.check_output(["/bin/bash", "-c", shell, "bash", "10.9.0.1", "10.9.0.2"], text=True).split()
    for kind in ("inference", "orchestrator", "trainer"):
        (line,) = (line for line in script if line.strip().startswith(f"start {kind} "))
        words = shlex.split(line.partition('"${hosts[@]}"')[2])
        argv = ["@", str(submitted("outputs/x") / "run.toml"), *addresses, *words]
        config = resolve(load_run_config(argv, section=kind, program=kind)[0], MACHINE, section=kind)
        assert problems(config, MACHINE, section=kind) == []
        assert (config.hosts.inference, config.hosts.trainer) == (("10.9.0.1",), ("10.9.0.2",))
        if kind != "orchestrator":
            assert getattr(config, f"{kind}_gpu_ids") == tuple(range(8))


def test_slurm_is_given_the_script_that_is_kept(folder, capsys):
    submit(["ours.toml", "--name", "x", "--partition", "gpu", "--time", "1-00", *SPREAD])
    assert (folder / "words").read_text() == "--parsable\n"
    script = (submitted("outputs/x") / "job.sbatch").read_text()
    assert (folder / "given").read_text() == script
    for option in ("--nodes=2", "--gpus-per-node=8", "--time=1-00", "--partition=gpu", "--signal=B:TERM@120"):
        assert f"#SBATCH {option}\n" in script
    shown = capsys.readouterr().out
    assert "submitted to slurm as 7\n" in shown
    assert "trireme logs outputs/x -f" in shown
    assert find_submission(Path("outputs/x")).job == "7"


SLURM = ("machine 1  orchestrator, trainer on 8 GPUs", "job.sbatch", "Slurm says: Job 7 to start at noon")
SLURM += ("TRIREME_TOKEN=(hidden)", "nothing was sub")
PODS = ('output_dir = "/runs/outputs"', "start trainer 5 env TRIREME_NODE=0", "the image must hold trireme")
IMAGE = ["--on", "kubernetes", "--image", "registry/trireme:1", "--volume", "runs"]


@pytest.mark.parametrize(("argv", "parts"), [(["ours.toml"], SLURM), (["hosted.toml", *IMAGE], PODS)])
def test_a_dry_run_shows_everything_and_writes_nothing(folder, capsys, argv, parts):
    assert submit([*argv, "--name", "x", "--dry-run", *SPREAD]) == 0
    shown = capsys.readouterr().out
    assert [part for part in parts if part not in shown] == []
    assert not list(folder.glob("outputs*"))


def test_secrets_are_their_owners_alone(folder):
    Path("configs").mkdir()
    Path("configs/keys.env").write_text("# keys\nexport OPENAI_API_KEY=sk-1234 # mine\nB='x y'\n\nC=\"a$b\"\n")
    Path("configs/run.toml").write_text('env_file = ["keys.env"]\n' + FORMATS["hosted"])
    for name in ("x", "y"):
        submit(["configs/run.toml", "--name", name, *SPREAD])
    place = submitted("outputs/x")
    config = loaded(place / "run.toml")
    assert (config.max_steps, config.orchestrator.batch_size, config.output_dir) == (7, 16, folder / "outputs")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (place, place / "secrets.sh")]
    assert modes == [0o700, 0o600]
    sourced = f'. {shlex.quote(str(place / "secrets.sh"))}; printf "%s|" "$OPENAI_API_KEY" "$B" "$C" "$TRIREME_TOKEN"'
    *keys, token, _ = subprocess.check_output(["/bin/bash", "-c", sourced], text=True, timeout=10).split("|")
    assert keys == ["sk-1234", "x y", "a$b"]
    assert len(token) >= 32
    assert token not in (submitted("outputs/y") / "secrets.sh").read_text()
    others = "".join(path.read_text() for path in place.iterdir() if path.name != "secrets.sh")
    assert ("sk-1234" in others, token in others) == (False, False)
    Path("keys.env").write_text("GOOD=1\nA='s3cret\n")
    with pytest.raises(ConfigError, match=r"keys\.env, line 2") as refused:
        read_env_files([Path("keys.env")])
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ours.toml"], "`--gpus-per-node 8`, or 0"),
        (["ours.toml", "--gpu-per-node", "8"], "Did you mean `--gpus-per-node`"),
        (["ours.toml", "--memory-per-node", "4", *SPREAD], "Write `--memory-per-node 500G`"),
        (["ours.toml", "--cpus-per-node", "4", *SPREAD], "want the same ports"),
        (["ours.toml", "--on", "kubernetes", "--volume", "runs", *SPREAD], "expected both: an image"),
        (["ours.toml", "--orchestrator.batch-size", "17", *SPREAD], "batch_size must be divisible"),
        (["ours.toml", "--model.name", "models/none", *SPREAD], "does not exist"),
        (["ours.toml", "--name", "there", *SPREAD], "Add --resume"),
        (["ours.toml", "--partition", "a\ntouch x", *SPREAD], '`--partition` is "a\\ntouch x", with control'),
        (["ours.toml", "--sbatch=--a\rb", *SPREAD], '`--sbatch` is "--a\\rb", with control characters'),
        (["flat.toml", "--print-config", *SPREAD], "--print-config has no meaning for a job"),
        (["ours.toml", "--output-dir", "a\nb", *SPREAD], 'output_dir = "a\\nb" has control characters'),
    ],
)
def test_what_cannot_be_submitted_says_what_to_type(folder, argv, words):
    (folder / "outputs/there").mkdir(parents=True)
    (folder / "outputs/there/metrics.jsonl").touch()
    with pytest.raises(ConfigError) as refused:
        submit(argv)
    assert str(refused.value).count(words) == 1
    assert not (folder / "words").exists()


TWO = {"nodes": 2, "gpus_per_node": 8}


@pytest.mark.parametrize(
    ("flags", "keys", "expected"),
    [
        (TWO, {}, (2, 8, 1)),
        (TWO | {"nodes": 3}, {}, (3, 8, 2)),  # an odd machine is an engine's
        (TWO | {"nodes": 3, "inference_nodes": 1}, {}, (3, 8, 1)),
        (TWO | {"gpus_per_node": 0}, {}, (2, 0, 1)),
        ({}, {"device": "cpu"}, (1, 0, 0)),
        ({}, {"inference_gpus": 2, "trainer_gpus": 1}, (1, 3, 0)),
        ({}, {"inference_gpu_ids": (0, 1), "trainer_gpu_ids": (1,)}, (1, 2, 0)),
        ({}, {"inference_gpus": 8, "trainer_gpus": 16}, (3, 8, 1)),
        ({"nodes": 3}, {"inference_gpus": 4, "trainer_gpus": 2}, (3, 2, 2)),
        ({"nodes": 3, "gpus_per_node": 8}, {"trainer_gpus": 16}, (3, 8, 1)),
    ],
)
def test_machines_are_whole_and_the_first_are_the_engines(flags, keys, expected):
    assert plan_nodes(updated(RunConfig(), keys), **flags) == ClusterPlan(*expected)


@pytest.mark.parametrize(
    ("flags", "keys", "words"),
    [
        (TWO, {"hosts.trainer": ("a",)}, r"has a table `\[hosts\]`"),
        (TWO | {"nodes": 1}, {"inference_gpus": 8, "trainer_gpus": 8}, "Write `--nodes 2`"),
        (TWO, {"inference_gpu_ids": (0,)}, "Write `--inference-nodes`"),
        (TWO | {"inference_nodes": 2}, {}, "expected 1 to 1"),
        (TWO, {"inference_gpus": 16}, "2 of 2 machines are for engines"),
        (TWO, {"inference_gpus": 8, "trainer_gpus": 12}, "Write multiples of `--gpus-per-node`"),
        (TWO, {"inference_gpus": 4, "trainer_gpus": 12}, "inference_gpus = 4 and trainer_gpus = 12"),
        (TWO | {"nodes": 3}, {"inference_gpus": 8, "trainer_gpus": 8}, "no machine left over"),
        (TWO, {"inference.parallel.tp": 3}, "each machine has 8 GPUs"),
    ],
)
def test_submit_refuses_gpus_that_are_not_whole_machines(flags, keys, words):
    with pytest.raises(ConfigError, match=words):
        plan_nodes(updated(RunConfig(), keys), **flags)
