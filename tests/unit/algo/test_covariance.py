"""The tokens that are restrained by their covariance, over a whole batch."""

import numpy as np
import pytest

from trireme.algo.covariance import chosen, with_restrained
from trireme.algo.packing import Sample, rows_of
from trireme.config.losses import Loss, resolve_loss
from trireme.messages import build_tokens

ADVANTAGES = np.array([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
LOGPROBS = np.array([-0.5, -3.5, -0.5, -3.5, -2.0, -2.0])  # mean -2: covariances 1.5, -1.5, -1.5, 1.5, 0, 0


def recipe(name: str, **more: float) -> Loss:
    return resolve_loss(Loss(type=name, **more), length=1)


@pytest.mark.parametrize(("ratio", "expected"), [(1e-4, [0]), (0.34, [0, 3]), (0.5, [0, 3, 4])])
def test_kl_cov_takes_the_largest_covariances(ratio, expected) -> None:
    assert sorted(chosen(ADVANTAGES, LOGPROBS, recipe("kl_cov", cov_ratio=ratio), step=3)) == expected


def test_clip_cov_draws_from_those_between_its_bounds() -> None:
    one = [chosen(ADVANTAGES, LOGPROBS, recipe("clip_cov"), step=step) for step in range(40)]
    assert {int(index) for (index,) in one} == {0, 3}
    assert sorted(chosen(ADVANTAGES, LOGPROBS, recipe("clip_cov", cov_ratio=1), step=0)) == [0, 3]
    assert len(chosen(ADVANTAGES, LOGPROBS, recipe("clip_cov", cov_low=1.5), step=0)) == 0
    assert len(chosen(ADVANTAGES[:0], LOGPROBS[:0], recipe("clip_cov"), step=0)) == 0


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    made = []
    for length in (5, 9, 3, 7):
        mask = [0, 0, *[1] * (length - 2)]
        columns = {"ids": range(length), "loss_mask": mask, "versions": [0] * length}
        columns |= {"logprobs": -3 * rng.random(length), "advantages": rng.normal(size=length)}
        made.append(Sample(build_tokens(**columns), 1.0))
    return made


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_choice_is_that_of_the_batch_in_whatever_rows_it_comes(name) -> None:
    found = with_restrained(
        samples(), recipe(name, cov_ratio=0.25, **{"cov_low": 0.01} if name == "clip_cov" else {}), step=5
    )
    columns = [np.concatenate([getattr(each.tokens, key) for each in found]) for key in ("loss_mask", "restrained")]
    assert 0 < columns[1].sum() <= 4
    assert not np.any(columns[1] & ~columns[0].astype(bool))
    rows = rows_of(found, [[2, 0], [3], [1]])
    assert [row.tokens.restrained.tolist() for row in rows] == [
        [*found[2].tokens.restrained, *found[0].tokens.restrained],
        found[3].tokens.restrained.tolist(),
        found[1].tokens.restrained.tolist(),
    ]


def test_other_losses_restrain_nothing() -> None:
    assert all(sample.tokens.restrained is None for sample in with_restrained(samples(), recipe("ppo"), step=0))
