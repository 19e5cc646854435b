"""A loss of the user's own is found, tried out and watched; what is wrong with it is said before a model is loaded."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trireme.algo.columns import CustomLoss, Totals
from trireme.base.errors import ConfigError
from trireme.base.functions import function_problem
from trireme.config.losses import resolve_loss
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Loss, TrainerConfig
from trireme.trainer.custom_loss import load_custom_loss, made_up_columns
from trireme.trainer.step import base_state, policy_gradient

GOOD = "def loss(columns, scale=1.0):\n    return -scale * columns.advantages * columns.logprobs\n"


def written(folder: Path, code: str) -> str:
    (folder / "mine.py").write_bytes(code.encode(errors="surrogateescape"))
    return f"{folder}/mine.py:loss"


def loaded(path: str, **args: object) -> CustomLoss:
    loss = load_custom_loss(resolve_loss(Loss(type="custom", path=path, args=args), length=1))
    assert loss is not None
    return loss


def test_a_function_gets_the_columns_and_its_arguments(tmp_path, monkeypatch):
    columns, path = made_up_columns(), written(tmp_path, GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    for each in (path, "mine:loss"):
        assert torch.equal(loaded(each, scale=2.0)(columns), -2.0 * columns.advantages * columns.logprobs)
    monkeypatch.delitem(sys.modules, "mine")
    written(tmp_path, "def loss(columns):\n    return columns.reference * columns.logprobs\n")
    with_reference = resolve_loss(Loss(type="custom", path=path, beta=0.1), length=1)
    assert load_custom_loss(with_reference) is not None  # it is tried out with a reference


def test_what_it_returns_is_normalized_like_any_other(tmp_path):
    path = written(tmp_path, GOOD)
    for normalize, divisors in (("token", (3, 3, 3)), ("sequence", (4, 4, 2)), ("constant", (8, 8, 8))):
        columns = made_up_columns()
        config = Loss(type="custom", path=path, normalize=normalize)
        policy_gradient(config, length=4)(columns, Totals(tokens=3, samples=2)).loss.backward()
        assert columns.logprobs.grad is not None
        expected = [-float(a) / d for a, d in zip(columns.advantages, divisors, strict=True)]
        assert columns.logprobs.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("def loss(columns):\n    return 0.5\n", "returned a float"),
        ("def loss(columns):\n    return columns.logprobs.mean()\n", "shape [] for 3 tokens"),
        ("def loss(columns):\n    return (columns.logprobs > 0)\n", "torch.bool"),
        ("def loss(columns):\n    return columns.advantages * 2\n", "without a gradient"),
        ("def loss(columns):\n    return columns.logprobs / 0\n", "inf"),
        ("def loss(columns):\n    return columns.rewards\n", "raised AttributeError"),
        ("def loss(columns, needed):\n    return columns.logprobs\n", "missing 1 required positional argument"),
        ("def other(columns):\n    return columns.logprobs\n", "mine.py has no `loss`"),
        ("loss = 3\n", "no function is called `loss`"),
        ("def loss(columns:\n", "line 1"),
        ("raise RuntimeError('no')\ndef loss(columns): ...\n", "raised RuntimeError: no"),
        ("mine.py", "names no function"),
        ("text = 'caf\udce9'\ndef loss(columns): ...\n", "codec can't decode byte 0xe9"),
        ("def loss(columns): ...\n\0", "null byte"),
        (f"{'a' * 300}.py:loss", "does not exist"),
        (f"{'a' * 300}:loss", "there is no module"),
        (".:loss", "there is no module"),
        ("math:no_such_thing", "math has no `no_such_thing`"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_before_anything_is_trained(tmp_path, code, what):
    with pytest.raises(ConfigError) as error:
        loaded(written(tmp_path, code) if "\n" in code else code)
    assert what in str(error.value)
    assert "trainer.loss.path" in str(error.value)
    assert "xpected" in str(error.value)


def test_custom_loss_with_an_unknown_argument_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="unexpected keyword argument 'sclae'"):
        loaded(written(tmp_path, GOOD), sclae=2)
    path = written(tmp_path, "def loss(columns):\n    l = columns.logprobs\n    return l if len(l) == 3 else l.sum()\n")
    columns = made_up_columns()
    with pytest.raises(ConfigError, match=r"shape \[\] for 6 tokens"):
        loaded(path)(replace(columns, logprobs=torch.cat([columns.logprobs, columns.logprobs])))


def test_a_bad_loss_is_refused_before_the_model_is_loaded(tmp_path, world):
    trainer = TrainerConfig(loss=Loss(type="custom", path=written(tmp_path, "def loss(columns):\n    return 1\n")))
    with pytest.raises(ConfigError, match="returned a int"):
        base_state(RunConfig(model=Model(name="/no/such/model"), trainer=trainer), world)
    path = written(tmp_path, "raise RuntimeError\nfrom somewhere import loss\n")
    assert function_problem(path, key="k") is None  # it may turn out to be one


def test_the_example_of_the_documentation_works_as_it_stands(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    code = page.partition("### A loss of yours")[2].partition("```python\n")[2].partition("```")[0]
    assert 'type = "custom"' in code
    columns, totals = made_up_columns(), Totals(tokens=3, samples=2)
    ours = policy_gradient(Loss(type="custom", path=written(tmp_path, code), args={"clip": 0.2}))(columns, totals)
    theirs = policy_gradient(Loss(type="ppo"))(made_up_columns(), totals)
    assert float(ours.value) == pytest.approx(float(theirs.value))
