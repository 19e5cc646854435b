"""The files of a search: what resumes it, what is repeated, what is written."""

import datetime
import json
import math

import pytest
from gepa.core.result import GEPAResult

from trireme.base.errors import ConfigError
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.files import Records, Reflection, check_same, write_results


def test_a_search_is_resumed_by_the_same_settings_alone(tmp_path):
    given = {"env_id": "e", "model": "m", "env_args": {"since": datetime.date(2024, 1, 1), "most": math.inf}}
    config = GepaConfig.model_validate(given)
    (tmp_path / "metadata.json").write_text(json.dumps(config.model_dump(mode="json")))
    check_same(tmp_path, GepaConfig.model_validate(given | {"max_calls": 7, "num_workers": 2}))
    for changed in ({"initial_prompt": "p.txt"}, {"num_val": 9}, {"env_args": {}}, {"seq_len": 99}):
        with pytest.raises(ConfigError, match=f"other settings .{next(iter(changed))}"):
            check_same(tmp_path, GepaConfig.model_validate(given | changed))


def test_gepa_repeats_reflections_that_were_torn_or_failed(tmp_path):
    file = tmp_path / "reflections.jsonl"
    records = Records(file, Reflection)
    for name in "abcd":
        records.add(Reflection(name=name, nth=0, question="q", answer=name, error="no" if name == "b" else None))
    file.write_bytes(file.read_bytes()[:-5])
    records = Records(file, Reflection)
    assert list(records.lines) == [("a", 0), ("c", 0)]
    records.add(Reflection(name="e", nth=0, question="q", answer="e"))
    with file.open("a") as lines:
        lines.write('{"name": "f", "nth": 0, "question": "q", "answer": "f", "state": NaN}\n')
    assert list(Records(file, Reflection).lines) == [("a", 0), ("c", 0), ("e", 0), ("f", 0)]


def test_a_date_of_a_toml_file_among_the_arguments_is_written_as_text(tmp_path):
    found = GEPAResult([{"system_prompt": "p"}], [[None]], [1.0], [{}], {}, [0])
    config = GepaConfig(env_id="e", model="m", env_args={"since": datetime.date(2026, 1, 2)})
    write_results(tmp_path, config, found, [], {"first_prompt": "p"})
    assert json.loads((tmp_path / "best_args.json").read_text()) == {"since": "2026-01-02", "system_prompt": "p"}
    check_same(tmp_path, config, "p")
    with pytest.raises(ConfigError, match="began with another prompt"):
        check_same(tmp_path, config, "q")
