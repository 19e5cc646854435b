"""The examples of a search, and where its models are."""

from pathlib import Path

import pytest

from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.optimize import draw_examples, places_of
from trireme.tools.policies.selection import PolicyWanted


@pytest.mark.parametrize(
    ("given", "num_train", "num_eval", "sizes"),
    [
        ({}, 2000, 100, (100, 50)),
        ({}, 48, 0, (32, 16)),
        ({}, 0, 60, (40, 20)),
        ({"num_val": 10}, 14, 0, (10, 4)),
        ({"num_train": 8, "num_val": 6}, 24, 4, (8, 4)),
    ],
)
def test_sizes_shrink_to_what_there_is_and_no_example_is_drawn_twice(given, num_train, num_eval, sizes):
    drawn = draw_examples(GepaConfig(env_id="e", model="m", **given), num_train=num_train, num_eval=num_eval)
    assert tuple(map(len, drawn)) == sizes
    assert len({each for part in drawn for each in part}) == sum(sizes)


def test_gepa_reflection_model_defaults_to_the_endpoint_of_the_model(here, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    Path("endpoints.toml").write_text('[large]\nmodel = "org/large"\nurl = "http://127.0.0.1:2/v1"\nkey = "two"\n')
    Path("folder").mkdir()
    large = PolicyWanted("org/large", "http://127.0.0.1:2/v1", "two", trained=False)
    assert places_of(GepaConfig(env_id="e", model="large")) == (large, large)
    found = places_of(GepaConfig(env_id="e", model="folder", reflection_model="large"))
    assert found == (PolicyWanted("folder", trained=False), large)
    for url, key in (("http://127.0.0.1:3/v1", None), ("https://127.0.0.1:3/v1", "mine")):  # in clear only if asked
        _, elsewhere = places_of(GepaConfig(env_id="e", model="m", base_url=url))
        assert elsewhere == PolicyWanted("m", url, key, trained=False)
        assert "mine" not in repr(elsewhere)
