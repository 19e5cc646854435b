"""What is typed after a flag."""

import json
import re
from argparse import ArgumentTypeError

import pytest

from trireme.config.arguments import count, json_table, positive, positive_int


@pytest.mark.parametrize(
    ("read", "taken", "refused"),
    [
        (positive_int, "3", "0"),
        (count, "0", "-1"),
        (positive, "0.5", "nan"),
        (json_table('{"a": 1}'), '{"a": [1]}', "[1]"),
    ],
)
def test_a_value_of_a_flag_is_taken_where_it_makes_sense_and_else_repeated(read, taken, refused):
    assert read(taken) == json.loads(taken)
    with pytest.raises(ArgumentTypeError, match=re.escape(repr(refused))):
        read(refused)
