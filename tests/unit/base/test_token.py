"""Tokens, and the keys that are made of them."""

import pytest
from cryptography.hazmat.primitives import hashes, hmac

from support.processes.limits import file_size_limit
from trireme.base.token import KEY_FILE, derive, make_token, read_key, status_key, token, write_key


def test_a_key_lies_in_the_run_folder_for_its_owner_alone(tmp_path):
    assert make_token()
    assert not make_token()  # a token that was given stays
    write_key(tmp_path, token())
    write_key(tmp_path, status_key())
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert read_key(tmp_path) == status_key() != token()
    write_key(tmp_path, None)
    with file_size_limit(9), pytest.raises(OSError, match="File too large"):
        write_key(tmp_path, token())
    assert read_key(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_derived_keys_differ_by_token_and_purpose():
    assert len({derive(token, purpose) for token in ("one", "two") for purpose in ("asker", "server")}) == 4
    made = hmac.HMAC(b"one", hashes.SHA256())  # RFC 4231's construction, worked by another library
    made.update(b"trireme asker")
    assert derive("one", "asker") == made.finalize()
