"""Only changes travel and whole tensors arrive, to the bit or not at all, also when received in the background."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tiny import save_tiny_model
from trireme.algo.patch import Form, Patch, build_patch, changed, to_integers, whole_patch
from trireme.base.background import in_background
from trireme.base.errors import ConfigError
from trireme.tools.export import weights_folder
from trireme.transport.weights.backends import take_transfer
from trireme.transport.weights.deltas import HostCopy, pack_body, pack_head
from weight_ends import DEADLINE_S, Ends, Tensors, digests_of, outcome, random_model, specs_of

CPU = torch.device("cpu")


def moved(model: Tensors, share: float, seed: int = 0) -> Tensors:
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, tensor in model.items():
        bits = to_integers(tensor)
        mask = torch.rand(bits.shape, generator=generator) < share
        which = torch.randint(0, 8 * tensor.element_size() - 1, bits.shape, generator=generator)
        flips = torch.ones_like(which).bitwise_left_shift(which).to(bits.dtype)
        found[name] = torch.where(mask, bits ^ flips, bits).view(tensor.dtype).view(tensor.shape)
    return found


def patches(model: Tensors, before: Tensors | None) -> list[Patch]:
    if before is None:
        return [whole_patch(tensor) for tensor in model.values()]
    return [build_patch(tensor, changed(tensor, before[name])) for name, tensor in model.items()]


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    opened = Ends(2, timeout_s=DEADLINE_S, delta=True)
    yield opened
    opened.close()


def send(ends: Ends, model: Tensors, parts: list[Patch], epoch: str, *, join: bool) -> list[dict[str, str] | None]:
    return outcome(ends.send(model, epoch=epoch, receivers=ends.receivers, join=join, parts=parts))


def test_every_change_arrives_at_every_receiver_to_the_bit(ends):
    before, model = None, random_model()
    for number, share in enumerate([0.01, 0.0, 0.3, 1.0, 0.001]):
        found = send(ends, model, patches(model, before), "a/1", join=before is None)
        assert found[1:] == [digests_of(model)] * 2
        before, model = model, moved(model, share, seed=number)
    other = random_model(seed=1)  # a new epoch begins with everything
    assert send(ends, other, patches(other, None), "b/2", join=True)[1:] == [digests_of(other)] * 2
    assert sum(patch.num_bytes for patch in patches(other, other)) == 0


@pytest.mark.parametrize(("spoiled", "share"), [("where", 0.01), ("values", 0.3)])
def test_a_corrupted_delta_has_another_digest(ends, spoiled, share):
    before, after = random_model(), moved(random_model(), share)
    send(ends, before, patches(before, None), f"d/{spoiled}{share}", join=True)
    expected = digests_of(after)
    for found in send(ends, after, corrupted(after, before, spoiled), f"d/{spoiled}{share}", join=False)[1:]:
        assert found is not None
        assert {name for name, digest in found.items() if digest != expected[name]} == {"embed"}


def corrupted(after: Tensors, before: Tensors, what: str) -> list[Patch]:
    first, *others = patches(after, before)
    bad = getattr(first, what).clone()
    bad[0] ^= 2
    return [replace(first, **{what: bad}), *others]


def test_a_delta_that_cannot_be_applied_ends_the_transfer_on_both_sides_at_once(ends):
    before, after = random_model(), moved(random_model(), 0.3)
    send(ends, before, patches(before, None), "e/1", join=True)
    parts = corrupted(after, before, "where")
    futures = ends.send(after, epoch="e/1", receivers=ends.receivers, join=False, parts=parts)
    assert isinstance(futures[0].exception(DEADLINE_S / 2), RuntimeError)
    assert all(future.exception(DEADLINE_S / 2) is not None for future in futures[1:])
    assert send(ends, after, patches(after, None), "e/2", join=True)[1:] == [digests_of(after)] * 2


@pytest.mark.parametrize("row", [[9, 0], [-1, 0], [int(Form.GAPS), 10**9], [int(Form.BITS), -1]])
def test_a_head_that_makes_no_sense_is_refused(row):
    model = {"norm": torch.zeros(16)}
    copy, specs = HostCopy(), specs_of(model)
    with pytest.raises(RuntimeError, match="arrived before its values"):
        copy.body_size(specs, torch.tensor([[int(Form.BITS), 1]]))
    whole = patches(model, None)
    assert dict(copy.take(specs, pack_head(whole, CPU), pack_body(whole, CPU))).keys() == {"norm"}
    with pytest.raises(RuntimeError, match="a patch of norm changes"):
        copy.body_size(specs, torch.tensor([row]))


def receive_ahead(ends: Ends, model: Tensors) -> Future[list[tuple[str, torch.Tensor]]]:
    coming = ends.receivers[0].tensors(specs_of(model), {})
    return in_background(lambda: [(name, tensor.clone()) for name, tensor in coming], name="weights")


def test_transfers_received_ahead_and_others_may_follow_one_another_until_one_breaks():
    ends = Ends(1, timeout_s=DEADLINE_S)
    outcome(ends.send(random_model(), epoch="a/1", receivers=ends.receivers))
    for seed in range(1, 5):
        model = random_model(seed=seed)
        if seed % 2:
            background = receive_ahead(ends, model)
            ends.sender.join("a/1", 2)
            ends.sender.send(specs_of(model), iter(model.values()))  # would wait for a receiver that does not listen
            assert digests_of(dict(take_transfer(background, DEADLINE_S))) == digests_of(model)
        else:
            futures = ends.send(model, epoch="a/1", receivers=ends.receivers, join=False)
            assert outcome(futures)[1:] == [digests_of(model)]
    model = random_model(seed=1)
    background = receive_ahead(ends, model)
    ends.sender.join("a/1", 2)
    ends.sender.close()
    with pytest.raises(RuntimeError):
        take_transfer(background, DEADLINE_S)
    assert outcome(ends.send(model, epoch="a/2", receivers=ends.receivers)) == [None, digests_of(model)]
    ends.close()


def test_a_transfer_that_does_not_come_is_waited_for_no_longer_than_allowed():
    with pytest.raises(TimeoutError, match="within 0 s"):
        take_transfer(Future(), 0.05)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.1)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder


def test_adapters_are_added_as_peft_adds_them(base, adapters, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(model, adapters).merge_and_unload().state_dict()
    source = weights_folder.open_source(adapters, base=None, dtype="float32")
    found = dict(source.tensors())
    assert [spec.name for spec in source.specs] == list(found)
    assert found.keys() == load_file(base / "model.safetensors").keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)
    changed = {name for name, tensor in load_file(base / "model.safetensors").items() if not tensor.equal(found[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
    source = weights_folder.open_source(adapters, base=None, dtype="bfloat16")
    assert {spec.dtype for spec in source.specs} == {"bfloat16"}
    assert {tensor.dtype for _, tensor in source.tensors()} == {torch.bfloat16}
    other = save_tiny_model(tmp_path / "other", hidden=128)
    with pytest.raises(ConfigError, match=r"does not fit .*other: .*has shape"):
        weights_folder.open_source(adapters, base=str(other), dtype="float32")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("adapter_config.json", b"{", r"adapter_config\.json is damaged"),
        ("adapter_config.json", b'{"r": 4}', "does not say lora_alpha"),
        ("adapter_model.safetensors", b"x", r"model\.safetensors is damaged"),
        ("adapter_model.safetensors", None, r"adapter_model\.safetensors is missing"),
    ],
)
def test_damaged_adapters_are_named(adapters, tmp_path, file, content, words):
    path = shutil.copytree(adapters, tmp_path / "step_1") / file
    path.write_bytes(content) if content is not None else path.unlink()
    with pytest.raises(ConfigError, match=words):
        weights_folder.require_readable(path.parent)


def test_a_model_in_several_files_is_the_same_model(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "parted")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in {*weight_map.values()}:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    parted = weights_folder.ModelFiles(folder)
    assert weights_folder.shape_difference(weights_folder.ModelFiles(base).shapes, parted.shapes) is None
    assert all(tensor.equal(tensors[name]) for name, tensor in parted.tensors())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1\.safetensors is missing"):
        weights_folder.require_readable(folder)


def test_a_receiver_reads_a_folder_itself_only_where_it_would_read_the_models_files_alone(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "model")
    assert weights_folder.ModelFiles(folder).folder == folder.resolve()
    save_file({"consolidated": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert weights_folder.ModelFiles(folder).folder is None


def test_a_head_that_is_the_embedding_may_stand_in_one_of_two_files():
    body, head = {"model.norm.weight": (4,)}, {"lm_head.weight": (8, 4)}
    assert weights_folder.shape_difference(body | head, body) is None
    assert weights_folder.shape_difference(body, body | head) is None
    assert weights_folder.shape_difference(body | head, body | {"lm_head.weight": (9, 4)}) is not None
    assert weights_folder.shape_difference(body, body | {"extra": (1,)}) == "extra is no tensor of it"
