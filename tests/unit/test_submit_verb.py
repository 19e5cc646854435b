"""`trireme submit`: from a file in any format to what a cluster is given, beside a scheduler that only takes notes."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.cli.submit import submit
from trireme.cli.train import train
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules import problems
from trireme.config.run import RunConfig
from trireme.launch.cluster.job import find_submission
from trireme.launch.cluster.secrets import read_env_files, read_token

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models/reverse-text-tiny")

OURS = f"""
max_steps = 7
[model]
name = "{MODEL}"
[trainer.ckpt]
interval = 5
[orchestrator]
batch_size = 16
rollouts_per_example = 8
[orchestrator.sampling]
max_tokens = 12
[[orchestrator.env]]
id = "reverse-text"
"""
HOSTED = f"""
model = "{MODEL}"
max_steps = 7
batch_size = 16
rollouts_per_example = 8
[sampling]
max_tokens = 12
[[env]]
id = "reverse-text"
"""
FLAT = f"""
model_name = "{MODEL}"
num_gpus = 16
max_steps = 7
batch_size = 16
rollouts_per_example = 8
[sampling]
max_tokens = 12
[env]
id = "reverse-text"
"""
FORMATS = {"ours": OURS, "hosted": HOSTED, "flat": FLAT}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where commands are typed: files in each format, and a scheduler."""
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
        '[ "$1" != --parsable ] || echo "7;tiny"\n'
    )
    sbatch.chmod(0o755)
    for tool in ("bash", "cat"):
        (bin_ / tool).symlink_to(Path("/bin") / tool)
    monkeypatch.setenv("PATH", str(bin_))
    return tmp_path


SPREAD = ["--nodes", "2", "--gpus-per-node", "8"]


def submitted(run: str) -> Path:
    found = find_submission(Path(run))
    assert found is not None
    return found.folder


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
    typed_there, typed_here = (config.model_dump(exclude_unset=True) for config in (there, here))
    assert typed_there == typed_here | {"device": "cuda"}
    for config in (there, here):
        assert problems(resolve(config, devices), devices) == []


@pytest.mark.parametrize("room", ["inference", "orchestrator", "trainer"])
def test_every_process_can_load_what_its_machine_is_given(folder, room):
    """The very words of `node.sh`, read by the command that they start."""
    submit(["flat.toml", "--name", "x", *SPREAD])
    script = (submitted("outputs/x") / "node.sh").read_text()
    line = next(line for line in script.splitlines() if line.strip().startswith(f"start {room} "))
    words = shlex.split(line.partition(f"trireme.cli.{room}")[2])
    hosts = next(line for line in script.splitlines() if line.startswith("hosts="))
    addresses = shlex.split(hosts.removeprefix("hosts=(").removesuffix(")"))
    named = {"${1}": "10.9.0.1", "${2}": "10.9.0.2", "$here/run.toml": str(submitted("outputs/x") / "run.toml")}
    argv = [named.get(word, word) for word in (*words[:2], *addresses, *words[3:])]
    devices = Devices(gpus=tuple("01234567"), cores=8)
    config = resolve(load_run_config(argv, section=room, program=room)[0], devices, section=room)
    assert problems(config, devices, section=room) == []
    assert (config.hosts.inference, config.hosts.trainer) == (("10.9.0.1",), ("10.9.0.2",))
    if room != "orchestrator":
        assert getattr(config, f"{room}_gpu_ids") == tuple(range(8))


def test_slurm_is_asked_before_and_given_the_same_script(folder, capsys):
    submit(["ours.toml", "--name", "x", "--partition", "gpu", "--time", "1-00", *SPREAD])
    assert (folder / "words").read_text() == "--test-only\n--parsable\n"
    script = submitted("outputs/x") / "job.sbatch"
    assert (folder / "given").read_text() == script.read_text()
    for option in ("--nodes=2", "--gpus-per-node=8", "--time=1-00", "--partition=gpu", "--signal=B:TERM@120"):
        assert f"#SBATCH {option}\n" in script.read_text()
    said = capsys.readouterr().out
    assert "Slurm's job 7: Job 7 to start at noon" in said
    assert "trireme logs outputs/x -f" in said
    record = json.loads((submitted("outputs/x") / "submission.json").read_text())
    assert (record["job"], record["processes"]["trainer"]) == ("7", 1)


def test_a_dry_run_shows_everything_and_writes_nothing(folder, capsys):
    assert submit(["ours.toml", "--dry-run", *SPREAD]) == 0
    said = capsys.readouterr().out
    for part in ("machine 1  orchestrator, trainer on GPU 0-7", "run.toml", "node.sh", "job.sbatch", "nothing was sub"):
        assert part in said
    assert "TRIREME_TOKEN=(hidden)" in said
    assert not (folder / "outputs").exists()
    assert not list(folder.glob("outputs*"))


def test_secrets_are_their_owners_alone(folder, capsys):
    (folder / "keys.env").write_text("# keys\nexport OPENAI_API_KEY=sk-1234 # mine\nB='x y'\n\nC=\"a$b\"\n")
    (folder / "hosted.toml").write_text('env_file = ["keys.env"]\n' + HOSTED)
    submit(["hosted.toml", "--name", "x", *SPREAD])
    capsys.readouterr()
    place = submitted("outputs/x")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "secrets.sh").stat().st_mode) == 0o600
    sourced = f'. {shlex.quote(str(place / "secrets.sh"))}; printf "%s|" "$OPENAI_API_KEY" "$B" "$C" "$TRIREME_TOKEN"'
    read = subprocess.run(["bash", "-c", sourced], capture_output=True, text=True, timeout=10).stdout.split("|")
    assert read[:3] == ["sk-1234", "x y", "a$b"]
    assert read[3] == read_token(place / "secrets.sh")
    assert len(read[3]) >= 32
    for file in (path for path in place.iterdir() if path.name != "secrets.sh"):
        assert "sk-1234" not in file.read_text()
        assert read[3] not in file.read_text()


def test_every_submission_has_a_token_of_its_own(folder):
    tokens = []
    for name in ("x", "y"):
        submit(["ours.toml", "--name", name, *SPREAD])
        tokens.append(read_token(submitted(f"outputs/{name}") / "secrets.sh"))
    assert tokens[0] != tokens[1]


def test_an_env_file_is_found_beside_the_runs_own(folder):
    place = folder / "configs"
    place.mkdir()
    (place / "run.toml").write_text('env_file = ["keys.env"]\n' + HOSTED)
    (place / "keys.env").write_text("A=1\n")
    submit(["configs/run.toml", "--name", "x", *SPREAD])
    assert "export A=1" in (submitted("outputs/x") / "secrets.sh").read_text()


@pytest.mark.parametrize("line", ["s3cret", "1A=s3cret", "A B=s3cret", "A='s3cret"])
def test_a_line_that_is_no_variable_is_named_without_what_it_says(tmp_path, line):
    file = tmp_path / "keys.env"
    file.write_text(f"GOOD=1\n{line}\n")
    with pytest.raises(ConfigError, match=r"keys\.env, line 2") as refused:
        read_env_files([file])
    assert "s3cret" not in str(refused.value)


def test_kubernetes_is_shown_as_manifests(folder, capsys):
    flags = ["--on", "kubernetes", "--image", "registry/trireme:1", "--storage", "100Gi", "--dry-run"]
    assert submit(["hosted.toml", "--name", "x", *flags, *SPREAD]) == 0
    said = capsys.readouterr().out
    assert 'output_dir = "/runs/outputs"' in said
    assert "run=/runs/outputs/x" in said
    assert "start trainer 5 env TRIREME_NODE=0 trainer @" in said
    assert "the image registry/trireme:1 must hold trireme and the environments reverse-text" in said


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as refused:
        submit(list(argv))
    return str(refused.value)


def test_what_cannot_be_submitted_says_what_to_type(folder):
    assert "`--gpus-per-node 8`, or 0" in refusal("ours.toml")
    assert "Did you mean `--partition`" in refusal("ours.toml", "--partiton", "x", *SPREAD)
    assert "expected the file of the run" in refusal("--nodes", "2")
    assert "4h" in refusal("ours.toml", "--time", "4h", *SPREAD)
    assert "--memory-per-node 500G" in refusal("ours.toml", "--memory-per-node", "lots", "--gpus-per-node", "1")
    assert "want the same ports" in refusal("ours.toml", "--cpus-per-node", "4", *SPREAD)
    assert "Write `--nodes 2`" in refusal("flat.toml", "--nodes", "1", "--gpus-per-node", "8")
    assert "dealt out by number" in refusal("ours.toml", "--inference-gpu-ids", "0", *SPREAD)
    assert "`[hosts]`" in refusal("ours.toml", "--hosts.orchestrator", "10.0.0.1", *SPREAD)
    assert "there is no run in" in refusal("ours.toml", "--resume", *SPREAD)
    assert "env_file" in refusal("ours.toml", "--env-file", "none.env", *SPREAD)
    assert "--image" in refusal("ours.toml", "--on", "kubernetes", "--storage", "1Gi", *SPREAD)
    assert "--volume CLAIM" in refusal("ours.toml", "--on", "kubernetes", "--image", "i", *SPREAD)


def test_what_the_run_itself_has_wrong_is_said_before_and_once(folder):
    said = refusal("ours.toml", "--orchestrator.batch-size", "17", *SPREAD)
    assert said.count("batch_size must be divisible") == 1
    assert not (folder / "words").exists()


def test_a_model_that_is_not_there_is_noticed_where_files_are_shared(folder):
    assert "does not exist" in refusal("ours.toml", "--model.name", "models/none", *SPREAD)
    submit(["ours.toml", "--model.name", "models/none", "--on", "kubernetes", "--dry-run", "--storage", "1Gi", *SPREAD])


def test_a_run_that_is_there_is_not_run_over_by_several_machines(folder):
    run = folder / "outputs/x"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    assert "Add --resume" in refusal("ours.toml", "--name", "x", *SPREAD)
    assert submit(["ours.toml", "--name", "x", "--resume", *SPREAD]) == 0


def test_without_a_schedulers_commands_it_has_to_be_named(folder):
    (folder / "bin/sbatch").unlink()
    assert "neither `sbatch` nor `kubectl`" in refusal("ours.toml", *SPREAD)
    assert "no `sbatch` in PATH" in refusal("ours.toml", "--on", "slurm", *SPREAD)
    assert submit(["ours.toml", "--on", "slurm", "--dry-run", *SPREAD]) == 0


def test_train_submit_is_submit(folder, capsys):
    assert train(["submit", "hosted.toml", "--name", "x", *SPREAD]) == 0
    assert "submitted as Slurm's job 7" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="Did you mean `trireme train submit`"):
        train(["sumbit", "hosted.toml"])
