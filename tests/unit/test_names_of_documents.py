"""What is listed of a reference document: places and names, nothing of its sentences."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "names_of_documents.py"

DOCUMENT = """\
# A title

Set `alpha` high, as in:

  ```toml path.toml theme={null}
  size = 3 # of a thing

  [one.two]
  key = "x"
  ```

```bash
# first
uv run tool @ file.toml \\
    --flag 3 https://example.org/x
KEY=value other
```

```python
args.beta = 1
```
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("names_of_documents", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their names up
    spec.loader.exec_module(module)
    return module


def test_names_are_those_of_a_document_read_by_hand(script: ModuleType) -> None:
    listed = script.list_document(DOCUMENT)
    assert listed["content"] == "1 3 5-6 8-10 12-17 19-21"
    assert listed["names"] == {
        3: ["alpha"],
        6: ["size"],
        8: ["one.two"],
        9: ["key"],
        14: ["tool", "file.toml"],
        15: ["--flag"],
        16: ["KEY", "other"],
        20: ["beta"],
    }
    assert listed["toml"] == {6: {"size": 3, "one": {"two": {"key": "x"}}}}


def test_a_block_that_shows_a_wrong_and_a_right_way_is_two(script: ModuleType) -> None:
    text = '```toml\n# Wrong\n[a]\nb = "c"\n\n# Right\n[a.b]\nc = 1\n```\n'
    assert script.list_document(text)["toml"] == {2: {"a": {"b": "c"}}, 6: {"a": {"b": {"c": 1}}}}


def test_the_list_is_written_with_a_line_for_a_line(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "000_x.txt").write_text(DOCUMENT)
    script.main(tmp_path)
    written = capsys.readouterr().out
    assert '   "15": ["--flag"],\n' in written
    assert script.json.loads(written)["tutorial"]["toml"] == {"6": {"size": 3, "one": {"two": {"key": "x"}}}}
