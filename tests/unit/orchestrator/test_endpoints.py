"""Files that say where models are asked are read, never run."""

from pathlib import Path

import pytest

from trireme.base.errors import ConfigError
from trireme.tools.evaluate.endpoints import Endpoint, find_endpoint, read_endpoints

BY_URL = 'ENDPOINTS = {"Qwen/Qwen2.5-7B": {"model": "Qwen/Qwen2.5-7B", "url": "http://h:8007/v1", "key": "local"}}\n'
BY_BASE_URL = """
import os

ENDPOINTS = {
    "default": {"base_url": "https://api.example.org/v1", "api_key": os.getenv("EXAMPLE_KEY")},
    "small": {"model": "small-model", "base_url": "http://127.0.0.1:1/v1", "api_key": os.environ["SMALL_KEY"]},
}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("EXAMPLE_KEY", "SMALL_KEY", "SOME_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "configs").mkdir()


def write(text: str, name: str = "configs/endpoints.py") -> Path:
    Path(name).write_text(text)
    return Path(name)


def test_both_ways_to_write_an_entry_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Qwen/Qwen2.5-7B"
    assert read_endpoints(write(BY_URL)) == {name: Endpoint(name, name, "http://h:8007/v1", "local")}
    monkeypatch.setenv("EXAMPLE_KEY", "secret")
    assert read_endpoints(write(BY_BASE_URL)) == {
        "default": Endpoint("default", None, "https://api.example.org/v1", "secret"),
        "small": Endpoint("small", "small-model", "http://127.0.0.1:1/v1", None, "SMALL_KEY"),
    }


@pytest.mark.parametrize(
    "text",
    ['["small/one"]\nmodel = "m"\nurl = "http://h/v1"\nkey = "EXAMPLE_KEY"\n',
     '[[endpoint]]\nendpoint_id = "small/one"\nmodel = "m"\nurl = "http://h/v1"\nkey = "EXAMPLE_KEY"\n'],
)  # fmt: skip
def test_toml_says_the_same_and_a_key_in_capitals_names_its_variable(text: str, monkeypatch) -> None:
    monkeypatch.setenv("EXAMPLE_KEY", "secret")
    found = read_endpoints(write(text, "configs/endpoints.toml"))
    assert found == {"small/one": Endpoint("small/one", "m", "http://h/v1", "secret")}


def test_nothing_of_a_python_file_is_run() -> None:
    text = 'open("ran", "w").close()\n'
    text += 'ENDPOINTS: dict = {"a": {"url": os.getenv("NO_SUCH_URL", "http://127.0.0.1:8007/v1"), "key": None}}\n'
    assert read_endpoints(write(text))["a"].url == "http://127.0.0.1:8007/v1"
    assert not Path("ran").exists()


def test_a_model_is_found_by_the_name_of_its_entry_by_its_own_and_else_at_the_default(monkeypatch) -> None:
    monkeypatch.setenv("EXAMPLE_KEY", "secret")
    write(BY_BASE_URL)
    assert find_endpoint("small").model == find_endpoint("small-model").model == "small-model"
    assert find_endpoint("grand") == Endpoint("default", "grand", "https://api.example.org/v1", "secret")
    assert "secret" not in repr(find_endpoint("grand"))
    # an entry's key never goes to another address
    assert find_endpoint("grand", base_url="http://elsewhere/v1").key is None
    assert find_endpoint("grand", base_url="https://api.example.org/v1/").key == "secret"


@pytest.mark.parametrize(
    ("text", "words"),
    [("ENDPOINTS = {'a': {'url': helper()}}", r"line 1: `helper\(\)` is no literal"),
     ("ENDPOINTS = {'a': {'ulr': 'http://h'}}", "'ulr' .*Did you mean 'url'"),
     ("ENDPOINTS = {'a': {'url': 'h:1'}}", "address 'h:1'"), ("ENDPOINTS = {'a': 'http://h'}", "endpoint 'a' is"),
     ("OTHER = {}", "has no ENDPOINTS"),
     ("ENDPOINTS = {", "cannot be read as Python")],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused_with_what_it_says(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_endpoints(write(text))


def test_what_is_not_there_is_said_with_what_is_and_a_key_is_asked_for_only_when_it_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"there is no configs/endpoints\.py here .*-b URL"):
        find_endpoint("small")
    write(BY_URL)
    with pytest.raises(ConfigError, match=r"did you mean Qwen/Qwen2\.5-7B\?"):
        find_endpoint("Qwen/Qwen2.5-7")
    write(BY_BASE_URL)
    assert find_endpoint("small").key is None  # a server of one's own may want none
    with pytest.raises(ConfigError, match=r"EXAMPLE_KEY, which is not set .*export EXAMPLE_KEY"):
        find_endpoint("grand")
