"""Write the pages of `docs/configuration`, the table of what a resumed run may change in `docs/reliability.md`, and the
JSON schemas in `configs/schema`, from the models and tables of the configuration.

uv run python scripts/configuration_reference.py [--check]

With --check nothing is written, and the exit code is 1 where a file differs from the models.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from trireme.config.files import PROCESSES
from trireme.config.reference import json_schema, key_tables
from trireme.config.resume import MEANING, RUN, SFT
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.tools.evaluate.config import EvalConfig
from trireme.tools.gepa.config import GepaConfig

ROOT = Path(__file__).resolve().parents[1]

PAGE = """\
# Configuration

Keys of [a run](run.md), its [trainer](trainer.md), [orchestrator](orchestrator.md) and [inference](inference.md); of
[`sft`](sft.md), [`eval`](eval.md) and [`trireme gepa`](gepa.md). `scripts/configuration_reference.py` generates these
pages; `rl --help` prints the same. A key without a default is not set.

**Where values come from.** Defaults, then environment variables, then files from left to right, then flags; the last
one wins. Tables merge key by key, lists are replaced. Files and flags may come in any order.

| | `lr` under `[trainer.optim]` |
|---|---|
| in a file (`rl @ run.toml`) | `[trainer.optim]`, `lr = 1e-5` |
| in a process's own file (`--trainer @ trainer.toml`, or `trainer @ trainer.toml`) | `[optim]`, `lr = 1e-5` |
| as a flag | `--trainer.optim.lr 1e-5`, and for the command `trainer` also `--optim.lr 1e-5` |
| as an environment variable | `TRIREME_TRAINER__OPTIM__LR=1e-5` |

Flags write `-` where keys have `_`. `--no-x` switches off a boolean or a table (`--no-wandb`); a table that is off by
default is switched on by its name (`--trainer.model.ac`) or by any of its keys. Lists are `--x 1 2`, `--x 1,2` or
`--x "[1, 2]"`; in a list of texts, words stay whole (`--x sh -c "echo a, b"`), and an empty text is the empty list.
Tables are JSON or TOML. Items of an array of tables go by number: `--orchestrator.env.0.id reverse-text`. `none` stands
for no value, in files too: `num_examples = "none"`.

Unknown keys are refused with a suggestion, and all problems are shown together before anything starts.

**Editors** that know TOML schemas (Taplo, Even Better TOML) complete and check files that begin with a line such as
`#:schema ../schema/rl.json`, the path from the file to `configs/schema`.

"""

ROOTS = {"run": RunConfig, "sft": SftConfig, "eval": EvalConfig, "gepa": GepaConfig}
TITLES = {
    "run": "Configuration of a run: `rl`",
    "trainer": "Configuration of the trainer",
    "orchestrator": "Configuration of the orchestrator",
    "inference": "Configuration of inference",
    "sft": "Configuration of `sft`",
    "eval": "Configuration of `eval`",
    "gepa": "Configuration of `trireme gepa`",
}
"""Pages of `docs/configuration`. The tables of a run's processes have pages of their own."""


def documents() -> Iterator[tuple[Path, str]]:
    """Yield each generated file with its text."""
    yield ROOT / "docs/configuration/index.md", PAGE
    for name, text in key_pages().items():
        yield ROOT / f"docs/configuration/{name}.md", text
    for name, root in (("rl", RunConfig), ("sft", SftConfig)):
        yield ROOT / f"configs/schema/{name}.json", json_schema(root)
    page = ROOT / "docs/reliability.md"
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- resume -->\n")
    yield page, f"{before}<!-- resume -->\n{resume_table()}<!-- /resume -->{rest.partition('<!-- /resume -->')[2]}"


def key_pages() -> dict[str, str]:
    """Return the pages by their names. A table that a page above has already, key by key, is linked to."""
    pages = {name: f"# {title}\n\n" for name, title in TITLES.items()}
    places: dict[str, tuple[str, str]] = {}  # where a table's rows are, and what that page says of the table
    for root_name, root in ROOTS.items():
        for header, about, rows in key_tables(root):
            table = header.strip("[]")
            process = table.partition(".")[0]
            page = process if root_name == "run" and process in PROCESSES else root_name

            if header:
                pages[page] += f"## `{header}`\n\n"
            link, known = places.get(rows, ("", ""))
            pages[page] += f"{about}\n\n" if about != known else ""
            if link:
                pages[page] += f"The keys of {link}.\n\n"
            elif rows:
                pages[page] += f"{rows}\n\n"
                places[rows] = (f"[`{header}`]({page}.md#{table.replace('.', '')})", about)
    return {name: text.rstrip("\n") + "\n" for name, text in pages.items()}


MANY = 5  # keys of one table with one answer are written as `table.*`


def resume_table() -> str:
    """Return what a resumed run may change as a table: one row for each answer, with its keys."""
    rows = ["| a changed key | of `rl` | of `sft`, beside or instead |", "|---|---|---|"]
    shortened: list[str] = []
    for when, meaning in MEANING.items():
        cells = [shorten(table.get(when, "").split()) for table in (RUN, SFT)]
        shortened += cells[0]
        rows.append(f"| {' | '.join([meaning, *(' '.join(f'`{key}`' for key in keys) for keys in cells)])} |")

    stars = [key for key in shortened if key.endswith(".*")]
    assert len(stars) == len(set(stars)), stars  # else two rows would claim the rest of one table
    return "\n".join(rows) + "\n"


def shorten(keys: list[str]) -> list[str]:
    """Replace many keys of one table by `table.*`: ["a.x", "a.y", "a.z", "a.b.*", "c"] -> ["a.*", "c"]."""
    tables = [key.removesuffix(".*").rpartition(".")[0] for key in keys]
    return list(
        dict.fromkeys(
            f"{table}.*" if table and tables.count(table) >= MANY else key
            for key, table in zip(keys, tables, strict=True)
        )
    )


def main() -> int:
    parser = ArgumentParser(description="Write the reference of all keys, and the JSON schemas.")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where a file is not current")
    is_check = parser.parse_args().check
    stale = {path: text for path, text in documents() if not path.exists() or path.read_text(encoding="utf-8") != text}
    if is_check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run `uv run python scripts/configuration_reference.py`")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
