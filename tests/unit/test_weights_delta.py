"""Changes alone travel, and whole tensors arrive: to the bit, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trireme.algo.digest import tensor_digest
from trireme.algo.patch import Form, Patch, build_patch, changed, to_integers, whole_patch
from trireme.transport.weights.deltas import HostCopy, pack_body, pack_head
from trireme.transport.weights.kinds import open_receiver, open_sender
from weight_ends import (
    BUCKET_BYTES,
    DEADLINE_S,
    SHORT_S,
    Ends,
    Tensors,
    digests_of,
    outcome,
    random_model,
    specs_of,
)

CPU = torch.device("cpu")


def moved(model: Tensors, share: float, seed: int = 0) -> Tensors:
    """Turn over one bit each in about that share of the values."""
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


def test_every_change_arrives_at_every_receiver_to_the_bit(ends: Ends) -> None:
    before, model = None, random_model()
    for number, share in enumerate([0.01, 0.0, 0.3, 1.0, 0.001]):
        found = send(ends, model, patches(model, before), "a/1", join=before is None)
        assert found[1:] == [digests_of(model)] * 2
        before, model = model, moved(model, share, seed=number)
    other = random_model(seed=1)  # a new epoch begins with everything
    assert send(ends, other, patches(other, None), "b/2", join=True)[1:] == [digests_of(other)] * 2
    assert sum(patch.num_bytes for patch in patches(other, other)) == 0


@pytest.mark.parametrize(("spoiled", "share"), [("where", 0.01), ("values", 0.3)])
def test_a_corrupted_delta_has_another_digest(ends: Ends, spoiled: str, share: float) -> None:
    before, after = random_model(), moved(random_model(), share)
    send(ends, before, patches(before, None), f"d/{spoiled}{share}", join=True)
    parts = corrupted(patches(after, before), spoiled)
    expected = digests_of(after)
    for found in send(ends, after, parts, f"d/{spoiled}{share}", join=False)[1:]:
        assert found is not None
        assert {name for name, digest in found.items() if digest != expected[name]} == {"embed"}


def corrupted(parts: list[Patch], what: str) -> list[Patch]:
    """One bit of the first patch is turned over."""
    bad = getattr(parts[0], what).clone()
    bad[0] ^= 2
    return [replace(parts[0], **{what: bad}), *parts[1:]]


def test_a_delta_that_cannot_be_applied_ends_the_transfer_on_both_sides_at_once(ends: Ends) -> None:
    """A bit more is set than there are values."""
    before, after = random_model(), moved(random_model(), 0.3)
    send(ends, before, patches(before, None), "e/1", join=True)
    parts = corrupted(patches(after, before), "where")
    futures = ends.send(after, epoch="e/1", receivers=ends.receivers, join=False, parts=parts)
    assert isinstance(futures[0].exception(DEADLINE_S / 2), RuntimeError)
    assert all(future.exception(DEADLINE_S / 2) is not None for future in futures[1:])
    assert send(ends, after, patches(after, None), "e/2", join=True)[1:] == [digests_of(after)] * 2


@pytest.mark.parametrize("row", [[9, 0], [-1, 0], [int(Form.GAPS), 10**9], [int(Form.BITS), -1]])
def test_a_head_that_makes_no_sense_is_refused(row: list[int]) -> None:
    model = {"norm": torch.zeros(16)}
    copy, specs = HostCopy(), specs_of(model)
    whole = patches(model, None)
    assert dict(copy.take(specs, pack_head(whole, CPU), pack_body(whole, CPU))).keys() == {"norm"}
    with pytest.raises(RuntimeError, match="norm of 16 values is to change"):
        copy.body_size(specs, torch.tensor([row]))


@given(shares=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.2, 1.0]), max_size=4), seed=st.integers(0, 100))
def test_a_copy_that_is_patched_is_what_was_sent(shares: list[float], seed: int) -> None:
    model, before = random_model(seed), None
    copy, specs = HostCopy(), specs_of(model)
    for share in [1.0, *shares]:
        parts = patches(model, before)
        head, body = pack_head(parts, CPU), pack_body(parts, CPU)
        assert len(body) == copy.body_size(specs, head)
        assert {name: tensor_digest(found) for name, found in copy.take(specs, head, body)} == digests_of(model)
        before, model = model, moved(model, share, seed)


def test_files_bring_changes_to_the_bit(tmp_path: Path) -> None:
    options = {"host": "", "port": 0, "bucket_bytes": BUCKET_BYTES, "timeout_s": SHORT_S}
    sender = open_sender("filesystem", folder=tmp_path / "broadcast", delta=True, **options)
    receiver = open_receiver("filesystem", device=CPU, **options)
    before, model, sizes = None, random_model(), []
    for share in (0.01, 0.01, 0.01):
        payload = sender.send(specs_of(model), patches(model, before))
        found = {name: tensor_digest(tensor) for name, tensor in receiver.tensors(specs_of(model), payload)}
        assert found == digests_of(model)
        sizes.append(sum(path.stat().st_size for path in Path(payload["folder"]).iterdir()))
        before, model = model, moved(model, share)
    assert sizes[1] < sizes[0] / 5
    receiver.join("another epoch", 1, 2)
    payload = sender.send(specs_of(model), patches(model, before))
    with pytest.raises(RuntimeError, match="nothing that they change is here"):
        list(receiver.tensors(specs_of(model), payload))
