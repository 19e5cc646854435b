"""Runs whose engine is split over several processes: each of them confirms the weights that it got."""

import pytest

from support.runs.real_run import QUICKSTART, Run, is_alive, started, wait_until

SIZES = {"data": "--inference.args.data-parallel-size", "tensor": "--inference.args.tensor-parallel-size"}

SLOW = pytest.mark.slow


@pytest.mark.parametrize("kinds", [["data"], pytest.param(["tensor"], marks=SLOW), pytest.param([*SIZES], marks=SLOW)])
def test_every_worker_of_an_engine_in_parts_confirms_each_version(kinds, tmp_path):
    flags = [word for kind in kinds for word in (SIZES[kind], "2")]
    words = ("@", QUICKSTART, "--max-steps", "3", "--orchestrator.eval", "none", "--output-dir", tmp_path, *flags)
    with started("rl", *words, log=tmp_path / "rl.log") as rl:
        assert rl.wait() == 0, rl.tail()
        assert rl.left() == []

    run = Run(tmp_path / "reverse-text")
    receivers = {row.get("weight_broadcast/receivers") for row in run.rows("orchestrator")} - {None}
    assert receivers == {2 ** len(kinds)}
    # prompts are shorter than a block of the cache, so that each member of a group computes its own
    assert all(row["perf/tokens_computed_frac"] > 1 for row in run.rows("orchestrator"))
    assert max(row["mismatch_kl"] for row in run.rows("trainer") if "mismatch_kl" in row) < 1e-6


@SLOW
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("corrupt_tensor", "core 2 of 2, does not compute with version 0"),
        ("skip_tensor", "worker 2 of 2: model.layers.1.mlp.gate_up_proj"),
    ],
)
def test_a_tensor_broken_on_the_second_core_alone_ends_the_run(broken, words, tmp_path):
    faults = {"TRIREME_FAULTS": f"{broken}.rank1=model.layers.1.mlp.up_proj.weight"}
    flags = ("@", QUICKSTART, SIZES["data"], "2", "--output-dir", tmp_path)
    with started("rl", *flags, log=tmp_path / "rl.log", env=faults) as rl:
        assert rl.wait() == 3, rl.tail()
        assert rl.left() == []
    assert words in " ".join(rl.output.split())
    assert Run(tmp_path / "reverse-text").rows("trainer") == []


@SLOW
def test_a_run_survives_the_death_of_its_engines_second_core(tmp_path):
    flags = ("@", QUICKSTART, SIZES["data"], "2", "--max-steps", "6", "--orchestrator.eval", "none")
    run = Run(tmp_path / "reverse-text")
    with started("rl", *flags, "--output-dir", tmp_path, log=tmp_path / "rl.log") as rl:
        wait_until(lambda: len(run.rows("trainer")) >= 2, "step 2", [rl])
        (core,) = (each for each in rl.family if is_alive(each) and "EngineCore_DP1" in " ".join(each.cmdline()))
        core.kill()
        assert rl.wait() == 0, rl.tail()
        assert rl.left() == []
    assert "1 restart: inference 1" in rl.output
    assert [row["step"] for row in run.rows("trainer")] == [*range(6)]


@SLOW
def test_a_broken_transfer_leaves_the_workers_of_a_core_in_step(tmp_path):
    """If a worker raised, vLLM would take each later answer of its neighbour for the answer to the next call."""
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "trainer.sending").write_text("kill")
    flags = ("@", QUICKSTART, SIZES["tensor"], "2", "--max-steps", "3", "--orchestrator.eval", "none")
    environment = {"TRIREME_FAULTS": f"folder={faults}"}
    with started("rl", *flags, "--output-dir", tmp_path, log=tmp_path / "rl.log", env=environment) as rl:
        assert rl.wait() == 0, rl.tail()
        assert rl.left() == []
    assert "1 restart: trainer 1" in rl.output
