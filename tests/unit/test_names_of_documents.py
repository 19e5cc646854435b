"""What is listed of a reference document: places and names, nothing of its sentences."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from names_of_documents import list_document, main

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


def test_names_are_those_of_a_document_read_by_hand(tmp_path, capsys):
    (tmp_path / "000_x.txt").write_text(DOCUMENT)
    main(tmp_path)
    written = capsys.readouterr().out
    assert '   "15": ["--flag"],\n' in written, "a line for a line"
    assert json.loads(written)["tutorial"] == {
        "content": "1 3 5-6 8-10 12-17 19-21",
        "names": {"3": ["alpha"], "6": ["size"], "8": ["one.two"], "9": ["key"], "14": ["tool", "file.toml"]}
        | {"15": ["--flag"], "16": ["KEY", "other"], "20": ["beta"]},
        "toml": {"6": {"size": 3, "one": {"two": {"key": "x"}}}},
    }


def test_a_block_that_shows_a_wrong_and_a_right_way_is_two():
    text = '```toml\n# Wrong\n[a]\nb = "c"\n\n# Right\n[a.b]\nc = 1\n```\n'
    assert list_document(text)["toml"] == {2: {"a": {"b": "c"}}, 6: {"a": {"b": {"c": 1}}}}
