"""Files of a run: an entry is whole or not there, what is torn is refused, and going back deletes nothing."""

import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

import trireme
import trireme_worker
from support.processes.limits import file_size_limit
from support.runs.resolved_runs import run_in
from support.runs.written_run import write_checkpoint
from trireme.base.devices import Devices
from trireme.base.errors import JournalCorrupt
from trireme.base.paths import RunPaths, step_folder, steps_in
from trireme.cli.command import note_provenance
from trireme.config.load import load_run_config
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.journal.entry import read_entry
from trireme.journal.journal import Journal
from trireme.journal.manifest import MANIFEST, complete_steps, find_damage
from trireme.journal.provenance import describe_environment, digest_of_files, gpu_names
from trireme.journal.provenance import read_provenance as read
from trireme.journal.provenance import write_provenance as write
from trireme.journal.records import BatchRecord, Cursor, Dropped, OpenGroup, Rollout, State
from trireme.journal.versions import Version, Versions
from trireme.launch.folder import prepare_folder
from trireme.launch.resume import rewind
from trireme.messages import build_tokens, encode


def record(step: int, *, size: int = 5) -> BatchRecord:
    columns = {"loss_mask": 1, "logprobs": -0.25, "advantages": 0.5, "versions": step}
    tokens = build_tokens(ids=range(size), **{name: [value] * size for name, value in columns.items()})
    place = {"group": step, "place": 0, "env": "say", "example": 3}
    rollout = Rollout(**place, attempt=1, reward=0.75, samples=[tokens], temperature=0.7)
    dropped = Dropped(**place, attempt=0, reason="score: ValueError: é")
    decided = {"cursors": {"say": Cursor(epoch=1, position=step)}, "open_groups": [OpenGroup(step, "say", example=9)]}
    state = State(next_batch=step + 1, next_group=2 * step + 2, counters={"trained": step + 1}, **decided)
    return BatchRecord(step=step, rollouts=[rollout], dropped=[dropped], state=state, metrics={"reward/mean": 0.75})


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal")
    for step in range(3):
        journal.append(record(step))
    return journal


def reopened(journal: Journal) -> Journal:
    return Journal(journal.path(0).parent)


def test_a_copy_beside_the_versions_is_none_of_them(tmp_path):
    Versions(tmp_path).record(7, ["http://127.0.0.1:8000"], {"w": "00ff"}, 1e-7)
    (tmp_path / "version_7 copy.msgpack").write_bytes(Versions(tmp_path).path(7).read_bytes())
    assert (Versions(tmp_path).known(), Versions(tmp_path).newest) == ([7], 7)


def test_an_entry_comes_back_as_it_was_written(journal, tmp_path):
    again = reopened(journal)
    assert [encode(again.read(step)) for step in again.steps()] == [encode(record(step)) for step in range(3)]
    assert again.head_state() == record(2).state
    assert Journal(tmp_path / "new").head_state() == State()


def test_journal_append_on_a_full_disk_leaves_nothing_behind(journal):
    with file_size_limit(50_000), pytest.raises(OSError, match="too large"):
        journal.append(record(3, size=100_000))
    assert (journal.steps(), journal.head_state().next_batch) == ([0, 1, 2], 3)
    journal.append(record(3))
    assert reopened(journal).head_state().next_batch == 4
    assert sorted(journal.path(0).parent.iterdir()) == list(map(journal.path, range(4)))


def test_a_rewound_journal_continues_from_before_and_deletes_nothing(journal):
    written = {step: journal.path(step).read_bytes() for step in range(3)}
    journal.rewind(1)
    assert (journal.steps(), journal.head_state().next_batch) == ([0], 1)
    journal.append(record(1, size=9))
    other = journal.path(1).read_bytes()
    journal.rewind(1)
    journal.rewind(5)
    asides = sorted(journal.path(0).parent.glob("set_aside_*"))
    aside = [[path.read_bytes() for path in sorted(folder.iterdir())] for folder in asides]
    assert aside == [[written[1], written[2]], [other]]
    assert reopened(journal).head_state().next_batch == 1


def test_a_wrong_or_missing_entry_is_named(journal):
    wrong = {
        journal.path(2).read_bytes()[:-1]: r"batch_000002\.msgpack.*--trainer\.ckpt\.resume-step 2 or less",
        journal.path(1).read_bytes(): r"batch_000002\.msgpack holds entry 1",
    }
    for content, words in wrong.items():
        journal.path(2).write_bytes(content)
        with pytest.raises(JournalCorrupt, match=words):
            reopened(journal).head_state()
    journal.path(1).unlink()
    with pytest.raises(JournalCorrupt, match=r"misses batch 1 of 2.*batch_000001\.msgpack"):
        reopened(journal).head_state()


def test_an_entry_cut_off_changed_or_added_to_anywhere_is_refused(tmp_path):
    Versions(tmp_path).record(7, ["http://127.0.0.1:8000"], {"w": "00ff"}, 1e-7)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    damaged, header = [content[:length] for length in range(len(content))], content.index(b"\n")
    for place, byte in enumerate(content):
        bits = range(8) if place <= header else [place % 8]  # behind it, everything is under one checksum
        damaged += [content[:place] + bytes([byte ^ 1 << bit]) + content[place + 1 :] for bit in bits]
        damaged += [content[:place] + more + content[place:] for more in (b"\0", b"\n", b"x" * 100)]
    for each in [*damaged, content + b"\0", content + b"\n"]:
        path.write_bytes(each)
        with pytest.raises(JournalCorrupt, match=r"Restore it\.|Go on with the version that wrote it") as caught:
            read_entry(path, 7, Version, ways_out="Restore it.")
        assert str(path) in str(caught.value)


def test_a_checkpoint_with_a_file_cut_off_or_changed_anywhere_is_damaged(tmp_path):
    folder = tmp_path / "step_2"
    write_checkpoint(folder, 2)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for length in range(0, len(content), 1 if path.name == MANIFEST else 50):
            path.write_bytes(content[:length])
            assert complete_steps(tmp_path) == []
            assert find_damage(folder) is not None
        for place in range(0, len(content), 25) if path.suffix == ".safetensors" else ():
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert path.name in (find_damage(folder) or "")
        path.write_bytes(content)
    assert (complete_steps(tmp_path), find_damage(folder)) == ([2], None)


LAST = 6


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(tmp_path / "run")
    journal, versions = Journal(paths.journal), Versions(paths.journal)
    for step in range(LAST):
        journal.append(BatchRecord(step, [], [], State(next_batch=step + 1)))
    for version in range(LAST + 1):
        versions.record(version, ["http://e"], {"w": str(version)}, 0.0)
    for version in (2, 4, 6):
        write_checkpoint(step_folder(paths.checkpoints, version), version)
        step_folder(paths.weights, version).mkdir(parents=True)
    for version in (0, 2, 4, 6):
        step_folder(paths.evals, version).mkdir(parents=True)
    paths.metrics.write_text("{}")
    return paths


def left(paths: RunPaths) -> dict[str, list[int]]:
    kinds = {"checkpoints": paths.checkpoints, "weights": paths.weights, "evals": paths.evals}
    in_ledger = {"batches": Journal(paths.journal).steps(), "versions": Versions(paths.journal).known()}
    return in_ledger | {kind: steps_in(folder) for kind, folder in kinds.items()}


AT_2 = {"batches": [0, 1], "versions": [0, 1, 2], "checkpoints": [2], "weights": [2], "evals": [0, 2]}
AT_0 = {"batches": [], "versions": [0], "checkpoints": [], "weights": [], "evals": [0]}


@pytest.mark.parametrize(("version", "expected"), [(2, AT_2), (0, AT_0)])
def test_what_came_after_a_version_is_set_aside_and_nothing_is_deleted(paths, version, expected):
    def files() -> list[str]:
        return sorted(path.name for path in paths.root.rglob("*") if not path.name.startswith("set_aside"))

    before, whole = files(), left(paths)
    for newest in (-1, None):  # sets nothing aside
        prepare_folder(run_in(paths.root, resume=True, resume_step=newest))
        assert left(paths) == whole
    for _ in range(2):  # the second time there is nothing to do
        prepare_folder(run_in(paths.root, resume_step=version))
        assert left(paths) == expected
    assert files() == before
    assert len(list(paths.root.rglob("set_aside*"))) == 5  # one for each kind


@pytest.mark.parametrize("after", range(4 + 4 + 2 + 2 + 2 + 1))  # moves of each kind
def test_a_launcher_killed_anywhere_leaves_a_run_that_either_way_can_go_on(paths, monkeypatch, after):
    moves, rename = [], Path.rename

    def counted(self: Path, target: Path) -> Path:
        if len(moves) == after:
            raise KeyboardInterrupt  # stands for `kill -9`
        moves.append(target)
        return rename(self, target)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", counted)
        rewind(paths, 2)
    now = left(paths)
    assert len(moves) == after
    for kind in ("batches", "versions"):
        assert now[kind] == list(range(len(now[kind]))), "a gap"
    assert len(now["batches"]) >= max(now["versions"]), "a version that cannot be trained again"
    assert max(now["checkpoints"]) <= max(now["versions"]), "a checkpoint of a version that was not confirmed"
    if len(now["batches"]) < LAST:
        assert now | {"batches": [0, 1]} == AT_2, "batches go last"
    step_folder(paths.checkpoints, 5).mkdir(exist_ok=True)  # half a checkpoint goes too
    rewind(paths, 2)
    assert left(paths) == AT_2


def test_provenance_from_before_a_resume_is_kept(tmp_path):
    paths = RunPaths(tmp_path)
    for number in (1, 1, 2, 3):
        write(paths, {"python": str(number)})
    kept = sorted(path.name for path in paths.configs.iterdir())
    assert kept == ["surroundings.earlier-1.json", "surroundings.earlier-2.json", "surroundings.json"]
    assert read(paths) == {"python": "3"}
    (paths.configs / "surroundings.json").write_text('{"python": ')
    assert read(paths) == {}


def test_a_digest_of_files_changes_with_any_file_and_not_with_byte_code(tmp_path):
    def digest_with(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return digest_of_files(tmp_path)

    changes = [("env.py", "x = 1"), ("train.jsonl", "{}"), ("train.jsonl", "[]"), ("env.py", "x = 2"), ("more.py", "")]
    seen = [digest_with(*change) for change in changes]
    assert len(set(seen)) == len(seen)
    assert digest_with("env.pyc", "compiled") == seen[-1]


def test_provenance_records_packages_and_environment_code(tmp_path):
    config = load_run_config(["@", "configs/reverse-text/rl.toml"], program="rl")[0]
    config = updated(config, {"output_dir": tmp_path / "known"})
    note_provenance(config, Devices(cores=2))
    noted = read(config.paths)
    assert noted["environments"]["reverse-text"]["files"] == digest_of_files(Path("environments/reverse_text"))
    assert noted["packages"]["transformers"] == metadata.version("transformers")
    assert noted["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (noted["machine"]["cores"], noted["trireme"]["files"]) == (2, digest_of_files(Path(trireme.__path__[0])))
    assert noted["trireme"]["worker_files"] == digest_of_files(Path(trireme_worker.__path__[0]))
    gone = {"output_dir": str(tmp_path), "orchestrator": {"env": [{"id": "not-installed"}, {"id": "gone.py"}]}}
    config = RunConfig.model_validate(gone)
    note_provenance(config, Devices(cores=2))
    assert read(config.paths)["environments"] == {"not-installed": {}, "gone": {}}
    # GPUs, and packages of an environment, are named as they lie on disk
    files = {"0000:00:00.0/information": "Model: \t NVIDIA H200\nIRQ:   \t 11\n"}
    for name, version in (("verifiers", "0.1.9"), ("datasets", "4.0.0"), ("idna", "3.1")):
        folder = f"venv/lib/python3.11/site-packages/{name}-{version}.dist-info"
        files[f"{folder}/METADATA"] = f"Name: {name}\nVersion: {version}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert gpu_names(tmp_path) == ["NVIDIA H200"]
    assert describe_environment(None, tmp_path / "venv/bin/python") == {"verifiers": "0.1.9", "datasets": "4.0.0"}
