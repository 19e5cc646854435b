"""Only changes travel and whole tensors arrive, to the bit or not at all, also when received in the background."""

from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from support.engines.weight_ends import DEADLINE_S, Ends, Tensors, digests_of, outcome, random_model, specs_of
from trireme.algo.patch import Form, Patch, build_patch, changed, whole_patch
from trireme.base.background import in_background
from trireme.transport.weights.buckets import HostCopy, pack_patches
from trireme.transport.weights.transfer import take_transfer

CPU = torch.device("cpu")


def moved(model: Tensors, share: float, seed: int = 0) -> Tensors:
    """Return the model with this share of the values of another one."""
    generator, others = torch.Generator().manual_seed(seed), random_model(seed + 100)
    masks = {name: torch.rand(tensor.shape, generator=generator) < share for name, tensor in model.items()}
    return {name: torch.where(masks[name], others[name], tensor) for name, tensor in model.items()}


def patches(model: Tensors, before: Tensors | None) -> list[Patch]:
    if before is None:
        return [whole_patch(tensor) for tensor in model.values()]
    return [build_patch(tensor, changed(tensor, before[name])) for name, tensor in model.items()]


@pytest.fixture(scope="module")
def ends():
    with closing(Ends(2, timeout_s=DEADLINE_S, delta=True)) as opened:
        yield opened


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


def test_inapplicable_delta_ends_the_transfer_on_both_sides(ends):
    before, after = random_model(), moved(random_model(), 0.3)
    send(ends, before, patches(before, None), "e/1", join=True)
    first, *others = patches(after, before)
    where = first.where.clone()
    where[0] ^= 2
    parts = [replace(first, where=where), *others]
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
    assert list(dict(copy.take(specs, *pack_patches(whole, CPU)))) == ["norm"]
    with pytest.raises(RuntimeError, match="a patch of norm changes"):
        copy.body_size(specs, torch.tensor([row]))


def receive_ahead(ends: Ends, model: Tensors) -> Future[list[tuple[str, torch.Tensor]]]:
    coming = ends.receivers[0].tensors(specs_of(model), {})
    return in_background(lambda: [(name, tensor.clone()) for name, tensor in coming], name="weights")


def test_transfers_may_alternate_between_received_ahead_and_direct():
    with closing(Ends(1, timeout_s=DEADLINE_S)) as ends:
        for seed in range(4):
            model = random_model(seed=seed)
            if seed % 2:
                background = receive_ahead(ends, model)
                ends.sender.join("a/1", 2)
                ends.sender.send(specs_of(model), iter(model.values()))  # would wait for one that does not listen
                assert digests_of(dict(take_transfer(background, DEADLINE_S))) == digests_of(model)
            else:
                futures = ends.send(model, epoch="a/1", receivers=ends.receivers, join=seed == 0)
                assert outcome(futures)[1:] == [digests_of(model)]
        background = receive_ahead(ends, model)
        with pytest.raises(TimeoutError, match="within 0 s"):
            take_transfer(background, 0.05)
        ends.sender.join("a/1", 2)
        ends.sender.close()
        with pytest.raises(RuntimeError):
            take_transfer(background, DEADLINE_S)
        assert outcome(ends.send(model, epoch="a/2", receivers=ends.receivers)) == [None, digests_of(model)]
