"""A filter chooses the rollouts that its words describe."""

import pytest

from trireme.base.errors import ConfigError
from trireme.tools.rollout_filters import parse_filter
from trireme.tools.rollouts import Record, Row

ROWS = [
    Row(number=0, example="9", rollout=0, reward=0.1 + 0.2, tokens=10, stop="length", truncated=True, env="a"),
    Row(number=1, example="10", rollout=1, reward=None, error="Timeout: late", env="b"),
    Row(number=2, example="x=1", rollout=0, reward=1.0, turns=3, advantage=-0.5, flaws="repetition", env="b"),
]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *[("", [0, 1, 2]), ("reward=0.3", [0]), ("reward<1", [0]), ("reward!=1 reward>=0", [0]), ("-reward<1", [1, 2])],
        *[("example=10", [1]), ("example>9", [1]), ("example<=9", [0]), ("example=x=1", [2]), ("tokens>=10", [0])],
        *[("turns>2 advantage<0", [2]), ("stop~LENG", [0]), ("error~timeout", [1]), ("env:b -is:failed", [2])],
        *[("is:truncated", [0]), ("is:flawed", [2]), ("is!=failed", [0, 2]), ("-is!=failed", [1])],
        *[("capital france", [0, 1, 2]), ('"capital of"', [0, 1, 2])],
        *[('"of capital"', []), ("-capital", []), ("-berlin", [0, 1, 2]), ("it's", [0, 1, 2]), ('"reward<1', [0])],
        ("https://no", []),
    ],
)
def test_a_filter_means_what_it_says(line, expected):
    chosen, text = parse_filter(line), "It's The Capital of reward<1 France"
    assert [row.number for row in ROWS if chosen.matches(row, lambda row: Record(row, answer=text))] == expected


@pytest.mark.parametrize("line", ["stp=3", "step~3", "reward=high", "is:good", "is<failed", "env<3", "example<--5"])
def test_a_filter_without_a_meaning_is_refused(line):
    with pytest.raises(ConfigError, match="Expected"):
        parse_filter(line)
