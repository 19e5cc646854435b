"""Messages between processes, and that the bytes of the current wire version stay readable.

After an intended change of a message, count `WIRE_VERSION` up, then write the new file (the old one may go):

    python tests/unit/test_messages.py
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from trireme import messages as wire
from trireme.messages import COLUMNS, Kept, Reply, Request, Routed, Tokens, TopLogprobs, build_tokens

GOLDEN = Path(__file__).parents[1] / "data" / f"wire_v{wire.WIRE_VERSION}.json"

TOKENS = build_tokens(
    ids=[5, 9, 70000], loss_mask=[0, 1, 1], logprobs=[0.0, -0.1, -2.5], advantages=[0.0, 0.5, -0.5], versions=[-1, 3, 4]
)
COLUMN = {name: [0, 1] for name in COLUMNS}
CUT = build_tokens(**COLUMN, kept=Kept(*np.array([[0, 2], [4, 1]], np.int32)))
ROUTED = Routed(np.array([1, 0], np.uint8), np.array([5, 2, 0, 7], np.uint8), layers=2, top_k=2)
SENT_TO = build_tokens(**COLUMN, routed=ROUTED)
SEEN = build_tokens(**COLUMN, pictures=[wire.Picture("a" * 64, place=0, rows=1, columns=2)])
TOP = TopLogprobs(np.array([0, 2], np.int32), np.array([5, 7], np.int32), np.array([-0.125, -2.5], np.float32))
LISTED = build_tokens(**COLUMN, top_logprobs=TOP)
WEIGHED = build_tokens(**COLUMN, ce_weights=np.array([0.5, 0.0], np.float32))
AGED = build_tokens(**COLUMN, oldest=np.array([-1, 0], np.int32))
SENT = {"run_id": "run", "version": 7, "attempt": 2}
SPECS = [wire.TensorSpec("model.norm.weight", "bfloat16", [64]), wire.TensorSpec("scale", "float32", [])]
PROBE = wire.Probe(ids=[1, 2, 3], logprobs=[-0.5, -1.25])
ROWS = [
    wire.MicroBatch(tokens=TOKENS, lengths=[2, 1], temperatures=[1.0, 0.7], sources=["a", "b"]),
    *(
        wire.MicroBatch(tokens=tokens, lengths=[2], temperatures=[1.0])
        for tokens in (CUT, SENT_TO, SEEN, LISTED, WEIGHED, AGED)
    ),
]
REQUESTS: list[Request] = [
    wire.GetNewest(run_id="run"),
    wire.GetBatch(run_id="run", step=41, rank=1, world=2),
    wire.PolicyReady(**SENT, incarnation="abc", everywhere=True, specs=SPECS, kind="gloo", host="127.0.0.1", port=5556),
    wire.PolicySent(**SENT, digests={"model.norm.weight": "00ff"}, probe=PROBE, payload={"folder": "broadcast/3"}),
    wire.Heartbeat(run_id="run", process="trainer", state="running", version=7, waits=["trainer waits 3 s for …"]),
    wire.Done(run_id="run", version=20),
    wire.GetTerms(),
    wire.Join(ticket="9f3c", url="http://10.0.0.21:8000", facts={"vllm": "0.32.0"}),
    wire.Beat(member=3, ticket="9f3c"),
    wire.Leave(member=3, ticket="9f3c", at_once=False),
]
REPLIES: list[Reply] = [
    wire.Newest(version=7, digests={"model.norm.weight": "00ff"}),
    wire.BatchReply(
        step=41,
        micro_batches=ROWS,
        loss_tokens=3,
        num_rollouts=3,
        loss_samples=3,
        pictures={"a" * 64: b"PNG"},
        ce_tokens=1,
    ),
    wire.Publish(reason="an engine came up without weights"),
    wire.Go(version=7, epoch="abc/3", world_size=3),
    wire.Again(reason="an engine died"),
    wire.Live(version=7),
    wire.Ok(),
    wire.NotYet(note="3 of 8 groups missing", busy=True),
    wire.Refusal(error="another run"),
    wire.Terms(run="{}", ticket="9f3c"),
    wire.Joined(member=3),
    wire.Dismissed(reason="the run is over", is_over=True),
]


def name_of(message: Any) -> str:
    return type(message).__name__


def test_the_bytes_of_this_wire_version_do_not_change():
    assert list(map(type, [*REQUESTS, *REPLIES])) == [*Request.__args__, *Reply.__args__], "an example of each message"
    for message in [*REQUESTS, *REPLIES]:
        stored = bytes.fromhex(json.loads(GOLDEN.read_text())[name_of(message)])
        found = (wire.decode_request if isinstance(message, Request) else wire.decode_reply)(stored)
        changed = f"{name_of(message)} changed: count WIRE_VERSION up, and see the top of this file"
        assert type(found) is type(message), changed
        assert wire.encode(found) == wire.encode(message) == stored, changed


def test_a_reply_is_no_request_and_an_unknown_object_cannot_be_sent():
    with pytest.raises(msgspec.ValidationError):
        wire.decode_request(wire.encode(wire.Live(version=1)))
    with pytest.raises(msgspec.ValidationError):
        wire.decode_reply(wire.encode(wire.Done(run_id="run", version=1)))
    with pytest.raises(TypeError, match="cannot send"):
        wire.encode(wire.NotYet(note=object()))  # type: ignore[arg-type]


def test_tokens_of_any_kind_of_numbers_get_the_types_of_their_columns():
    for values in (np.arange(6, dtype=np.float64)[::2], []):
        tokens = build_tokens(**dict.fromkeys(COLUMNS, values))
        for each in (tokens, wire.decode_as(Tokens, wire.encode(tokens))):
            assert [getattr(each, name).dtype for name in COLUMNS] == [dtype for dtype, _ in COLUMNS.values()]
            assert all(getattr(each, name).tolist() == list(values) for name in COLUMNS)


if __name__ == "__main__":
    stored = {name_of(message): wire.encode(message).hex() for message in [*REQUESTS, *REPLIES]}
    GOLDEN.write_text(json.dumps(stored, indent=1) + "\n")
