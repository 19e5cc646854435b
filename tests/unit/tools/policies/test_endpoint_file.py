"""Files that say where models are asked are read, never run."""

from pathlib import Path

import pytest

from trireme.base.errors import ConfigError
from trireme.tools.policies.endpoint_file import Endpoint, find_endpoint, read_endpoints

BY_BASE_URL = """
import os

ENDPOINTS = {
    "default": {"base_url": "https://api.example.org/v1", "api_key": os.getenv("EXAMPLE_KEY")},
    "small": {"model": "small-model", "base_url": "http://127.0.0.1:1/v1", "api_key": os.environ["SMALL_KEY"]},
}
"""
THAT_RUNS = """
open("ran", "w").close()
ENDPOINTS: dict = {"a": {"url": os.getenv("NO_SUCH_URL", "http://127.0.0.1:8007/v1"), "key": "local"}}
"""
IN_TOML = 'model = "m"\nurl = "http://h/v1"\nkey = "EXAMPLE_KEY"\n'  # a key in capitals names its variable

DEFAULT = Endpoint("default", None, "https://api.example.org/v1", "secret")
SMALL = Endpoint("small", "small-model", "http://127.0.0.1:1/v1", None, "SMALL_KEY")
OF_TOML = Endpoint("small/one", "m", "http://h/v1", "secret")


@pytest.fixture(autouse=True)
def _here(here, monkeypatch):
    for name in ("SMALL_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EXAMPLE_KEY", "secret")
    (here / "configs").mkdir()


def write(text: str, suffix: str = ".py") -> Path:
    file = Path("configs/endpoints").with_suffix(suffix)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("suffix", "text", "entries"),
    [
        (".py", BY_BASE_URL, [DEFAULT, SMALL]),
        (".py", THAT_RUNS, [Endpoint("a", None, "http://127.0.0.1:8007/v1", "local")]),
        (".toml", f'["small/one"]\n{IN_TOML}', [OF_TOML]),
        (".toml", f'[[endpoint]]\nendpoint_id = "small/one"\n{IN_TOML}', [OF_TOML]),
    ],
)
def test_each_way_to_write_an_entry_is_read_and_nothing_is_run(suffix, text, entries):
    assert read_endpoints(write(text, suffix)) == {entry.name: entry for entry in entries}
    assert not Path("ran").exists()


def test_endpoint_is_found_by_the_name_of_its_entry_or_model(monkeypatch):
    write(BY_BASE_URL)
    small = Endpoint("small", "small-model", "http://127.0.0.1:1/v1", None)  # a server of one's own may want no key
    assert find_endpoint("small") == find_endpoint("small-model") == small
    grand = find_endpoint("grand")
    assert grand == Endpoint("default", "grand", "https://api.example.org/v1", "secret")
    assert "secret" not in repr(grand)
    # an entry's key never goes to another address
    assert find_endpoint("grand", base_url="http://elsewhere/v1").key is None
    assert find_endpoint("grand", base_url="https://api.example.org/v1/").key == "secret"
    monkeypatch.delenv("EXAMPLE_KEY")
    with pytest.raises(ConfigError, match=r"EXAMPLE_KEY, which is not set .*export EXAMPLE_KEY"):
        find_endpoint("grand")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ENDPOINTS = {'a': {'url': helper()}}", r"line 1: `helper\(\)` is no literal"),
        ("ENDPOINTS = {'a': {'ulr': 'http://h'}}", "'ulr' .*Did you mean 'url'"),
        ("ENDPOINTS = {'a': {'url': 'h:1'}}", "address 'h:1'"),
        ("ENDPOINTS = {'a': 'http://h'}", "endpoint 'a' is"),
        ("OTHER = {}", "has no ENDPOINTS"),
        ("ENDPOINTS = {", "cannot be read as Python"),
        ("ENDPOINTS = {'Qwen/Qwen2.5-7B': {'url': 'http://h'}}", r"did you mean Qwen/Qwen2\.5-7B\?"),
        (None, r"there is no configs/endpoints\.py here .*-b URL"),
    ],
)
def test_a_file_that_says_something_else_is_refused_with_what_it_says(text, words):
    if text is not None:
        write(text)
    with pytest.raises(ConfigError, match=words):
        find_endpoint("Qwen/Qwen2.5-7")
