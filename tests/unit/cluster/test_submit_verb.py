"""`trireme submit`: from a file in any format to what a cluster is given, with a scheduler that only takes notes."""

import json
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.cli.runs.submit import submit
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules import problems
from trireme.config.run import RunConfig
from trireme.tools.cluster.job import find_submission, read_env_files

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "models/reverse-text-tiny")

COMMON = "max_steps = 7\nbatch_size = 16\nrollouts_per_example = 8\nsampling.max_tokens = 12\n"
FORMATS = {
    "ours": f'max_steps = 7\nmodel.name = "{MODEL}"\n[orchestrator]\nbatch_size = 16\nrollouts_per_example = 8\n'
    'sampling.max_tokens = 12\nenv = [{ id = "reverse-text" }]\n',
    "hosted": f'model = "{MODEL}"\n{COMMON}[[env]]\nid = "reverse-text"\n',
    "flat": f'model_name = "{MODEL}"\nnum_gpus = 16\n{COMMON}[env]\nid = "reverse-text"\n',
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for name, text in FORMATS.items():
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    monkeypatch.chdir(tmp_path)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    sbatch = bin_ / "sbatch"
    sbatch.write_text(
        f'#!{bin_}/bash\necho "$*" >>{tmp_path}/words\ncat >{tmp_path}/given\n'
        '[ "$1" != --test-only ] || echo "sbatch: Job 7 to start at noon" >&2\n'
        f'[ "$1" != --parsable ] || {{ echo "sbatch: warning: no --mem" >&2; cat {tmp_path}/number; }}\n'
    )
    sbatch.chmod(0o755)
    (tmp_path / "number").write_text("7\n")
    for tool in ("bash", "cat"):
        (bin_ / tool).symlink_to(Path("/bin") / tool)
    monkeypatch.setenv("PATH", str(bin_))
    return tmp_path


SPREAD = ["--nodes", "2", "--gpus-per-node", "8"]


def submitted(run: str) -> Path:
    return find_submission(Path(run)).folder


def loaded(file: Path, *flags: str) -> RunConfig:
    return load_run_config(["@", str(file), *flags], program="rl")[0]


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_run_is_submitted_from_every_format(folder, name):
    assert submit([f"{name}.toml", "--name", name, *SPREAD]) == 0
    config = loaded(submitted(f"outputs/{name}") / "run.toml")
    assert (config.model.name, config.max_steps, config.device) == (MODEL, 7, "cuda")
    assert (config.orchestrator.batch_size, config.orchestrator.rollouts_per_example) == (16, 8)
    assert config.orchestrator.sampling.max_tokens == 12
    assert [environment.id for environment in config.orchestrator.env] == ["reverse-text"]
    assert config.output_dir == folder / "outputs"


def test_one_machine_gets_exactly_what_was_typed(folder):
    """Nothing is derived on the way, so the machine derives it as if the file had been typed there."""
    flags = ["--trainer.loss.type", "grpo", "--trainer.model.lora.rank", "8", "--orchestrator.sampling.top-p", "0.9"]
    submit(["ours.toml", "--name", "x", "--gpus-per-node", "8", *flags])
    devices = Devices(gpus=tuple("01234567"), cores=8)
    there = loaded(submitted("outputs/x") / "run.toml")
    here = loaded(folder / "ours.toml", "--name", "x", "--output-dir", str(folder / "outputs"), *flags)
    assert there.model_dump(exclude_unset=True) == here.model_dump(exclude_unset=True) | {"device": "cuda"}
    assert problems(resolve(there, devices), devices) == []


def test_every_process_can_load_what_its_machine_is_given(folder):
    submit(["flat.toml", "--name", "x", *SPREAD])
    script = (submitted("outputs/x") / "node.sh").read_text().splitlines()
    (hosts,) = (line for line in script if line.startswith("hosts="))
    shell = f'{hosts}; printf "%s\\n" "${{hosts[@]}}"'
    addresses = subprocess.check_output(["bash", "-c", shell, "bash", "10.9.0.1", "10.9.0.2"], text=True).split()
    devices = Devices(gpus=tuple("01234567"), cores=8)
    for kind, gpus in (("inference", devices.num_gpus), ("orchestrator", None), ("trainer", devices.num_gpus)):
        (line,) = (line for line in script if line.strip().startswith(f"start {kind} "))
        words = shlex.split(line.partition('"${hosts[@]}"')[2])
        argv = ["@", str(submitted("outputs/x") / "run.toml"), *addresses, *words]
        config = resolve(load_run_config(argv, section=kind, program=kind)[0], devices, section=kind)
        assert problems(config, devices, section=kind) == []
        assert (config.hosts.inference, config.hosts.trainer) == (("10.9.0.1",), ("10.9.0.2",))
        if gpus:
            assert getattr(config, f"{kind}_gpu_ids") == tuple(range(gpus))


@pytest.mark.parametrize("number", ["7", "7;tiny"])
def test_slurm_is_given_the_script_that_is_kept(folder, capsys, number):
    (folder / "number").write_text(f"{number}\n")
    submit(["ours.toml", "--name", "x", "--partition", "gpu", "--time", "1-00", *SPREAD])
    assert (folder / "words").read_text() == "--parsable\n"
    script = submitted("outputs/x") / "job.sbatch"
    assert (folder / "given").read_text() == script.read_text()
    for option in ("--nodes=2", "--gpus-per-node=8", "--time=1-00", "--partition=gpu", "--signal=B:TERM@120"):
        assert f"#SBATCH {option}\n" in script.read_text()
    said = capsys.readouterr().out
    assert "submitted to slurm as 7" in said
    assert "trireme logs outputs/x -f" in said
    assert json.loads((submitted("outputs/x") / "submission.json").read_text())["job"] == "7"


SLURM = (
    "machine 1  orchestrator, trainer on 8 GPUs",
    "job.sbatch",
    "Slurm says: Job 7 to start at noon",
    "TRIREME_TOKEN=(hidden)",
    "nothing was sub",
)
PODS = ('output_dir = "/runs/outputs"', "start trainer 5 env TRIREME_NODE=0", "the image must hold trireme")
IMAGE = ["--on", "kubernetes", "--image", "registry/trireme:1", "--volume", "runs"]


@pytest.mark.parametrize(("argv", "parts"), [(["ours.toml"], SLURM), (["hosted.toml", *IMAGE], PODS)])
def test_a_dry_run_shows_everything_and_writes_nothing(folder, capsys, argv, parts):
    assert submit([*argv, "--name", "x", "--dry-run", *SPREAD]) == 0
    said = capsys.readouterr().out
    assert [part for part in parts if part not in said] == []
    assert not list(folder.glob("outputs*"))


def test_secrets_are_their_owners_alone(folder):
    (folder / "configs").mkdir()
    keys = "# keys\nexport OPENAI_API_KEY=sk-1234 # mine\nB='x y'\n\nC=\"a$b\"\n"
    (folder / "configs" / "keys.env").write_text(keys)
    (folder / "configs" / "run.toml").write_text('env_file = ["keys.env"]\n' + FORMATS["hosted"])
    for name in ("x", "y"):
        submit(["configs/run.toml", "--name", name, *SPREAD])
    place = submitted("outputs/x")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "secrets.sh").stat().st_mode) == 0o600
    sourced = f'. {shlex.quote(str(place / "secrets.sh"))}; printf "%s|" "$OPENAI_API_KEY" "$B" "$C" "$TRIREME_TOKEN"'
    read = subprocess.run(["bash", "-c", sourced], capture_output=True, text=True, timeout=10).stdout.split("|")
    assert read[:3] == ["sk-1234", "x y", "a$b"]
    assert len(read[3]) >= 32
    assert read[3] not in (submitted("outputs/y") / "secrets.sh").read_text()
    for file in (path for path in place.iterdir() if path.name != "secrets.sh"):
        assert "sk-1234" not in file.read_text()
        assert read[3] not in file.read_text()


def test_a_line_that_is_no_variable_is_named_without_what_it_says(tmp_path):
    file = tmp_path / "keys.env"
    file.write_text("GOOD=1\nA='s3cret\n")
    with pytest.raises(ConfigError, match=r"keys\.env, line 2") as refused:
        read_env_files([file])
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
    ],
)
def test_what_cannot_be_submitted_says_what_to_type(folder, argv, words):
    (folder / "outputs/there").mkdir(parents=True)
    (folder / "outputs/there/metrics.jsonl").touch()
    with pytest.raises(ConfigError) as refused:
        submit(argv)
    assert str(refused.value).count(words) == 1
    assert not (folder / "words").exists()
