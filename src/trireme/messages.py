"""Every message that crosses a process boundary, in the order in which it travels.

    environment worker <-> orchestrator    see `orchestrator/session/wire.py`: workers lack this package
    orchestrator -> trainer                GetNewest asks, Newest answers; GetBatch asks, BatchReply or Publish answers
    trainer -> orchestrator -> engines     PolicyReady, Go, PolicySent, Live; Again if an attempt failed
    orchestrator or `eval` -> engine       InitInfo, UpdateInfo: bodies of vLLM's weight-transfer routes, as JSON
    trainer -> orchestrator                Heartbeat, Done
    joining engine -> orchestrator         GetTerms, Terms; Join, Joined; then Beat each second, and Leave

The trainer always asks and the orchestrator always answers, within a second, if only with `NotYet`. Every request
can be sent again after a crash or a lost reply: the answer is the same. Versions count optimizer steps: version 0 is
the base model, batch n is trained by version n and makes version n + 1.

Shapes: T tokens of one sample, or of one packed row; S samples in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from pydantic import BaseModel

WIRE_VERSION = 11

Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 16)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Words = Annotated[str, Meta(max_length=1 << 12)]
"""Bounds that the decoder checks. `transport/sanity.py` checks how the numbers of a message fit together."""


class Kept(msgspec.Struct, frozen=True):
    """The tokens that a truncated sampler (top_p, top_k, min_p) could choose from, one list per token.

    Example:
        Kept(counts=[0, 3, 1], ids=[5, 7, 9, 7])  # the second token was one of 5, 7, 9; the third had to be 7
    """

    counts: np.ndarray  # [T] int32: 0 if the token was not sampled, or from the whole vocabulary
    ids: np.ndarray  # [sum of counts] int32, ascending within each token


class TopLogprobs(msgspec.Struct, frozen=True):
    """The likeliest tokens at each place and their logprobs under the policy that sampled, for score centering.

    Example:
        TopLogprobs(counts=[0, 2], ids=[5, 7], logprobs=[-0.1, -2.6])  # at the second token: 5, then 7
    """

    counts: np.ndarray  # [T] int32: 0 if the token was not sampled, or nothing is known
    ids: np.ndarray  # [sum of counts] int32
    logprobs: np.ndarray  # [sum of counts] float32: as `Tokens.logprobs`, of the distribution that was sampled from


class Routed(msgspec.Struct, frozen=True):
    """The experts that the engine sent tokens to, in a model with a mixture of experts.

    Example:
        Routed(known=[1, 0], experts=[5, 2, 0, 7], layers=2, top_k=2)  # the first token: 5 and 2, then 0 and 7
    """

    known: np.ndarray  # [T] uint8: 1 if the engine reported it; it never computes the last token of a sample
    experts: np.ndarray  # [sum of known * layers * top_k] uint8, or uint16 if there are more than 256 experts
    layers: int  # layers of the model; the entries of those without experts mean nothing
    top_k: int


class Picture(msgspec.Struct, frozen=True):
    """A picture in a conversation: the image tokens that stand for it, `rows` times `columns` of them, row by row.

    Example:
        Picture(digest="9f…", place=5, rows=2, columns=3)  # tokens 5 to 10
    """

    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # SHA-256 of the file, see `journal/pictures.py`
    place: Count  # place of its first token in the sample or row
    rows: Annotated[int, Meta(ge=1, le=1 << 16)]
    columns: Annotated[int, Meta(ge=1, le=1 << 16)]

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


class Tokens(msgspec.Struct, frozen=True):
    """Per-token columns of one sample or of one packed row. A new per-token quantity is one line here.

    Example:
        Tokens(ids=[5, 9, 7], loss_mask=[0, 1, 1], logprobs=[0, -0.1, -2.3], advantages=[0, 1, 1], versions=[-1, 3, 4])
    """

    ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] uint8: 1 if a model sampled the token and it is trained on
    logprobs: np.ndarray  # [T] float32: logprob under the model that sampled the token, 0 if the mask is 0
    advantages: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32: the policy version that sampled it, -1 if the policy did not
    kept: Kept | None = None  # given if sampling was cut; logprobs are those among the kept tokens
    routed: Routed | None = None  # given if the trainer must send tokens to the engine's experts
    pictures: list[Picture] = []  # pictures, ascending by their places
    top_logprobs: TopLogprobs | None = None  # given if the loss centers scores
    restrained: np.ndarray | None = None  # [T] uint8: 1 if the loss restrains the token, see `algo/covariance.py`
    ce_weights: np.ndarray | None = None  # [T] float32: above 0 if cross-entropy trains the token, by this weight
    oldest: np.ndarray | None = None  # [T] int32: oldest version that it attended to; if None, as `versions`

    @property
    def attended(self) -> np.ndarray:
        """[T] int32: the oldest version that each token attended to through a cache, or that sampled it."""
        return self.versions if self.oldest is None else self.oldest

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def by_cross_entropy(self) -> np.ndarray:
        """[T] bool: trained by cross-entropy. The policy did not sample these."""
        return np.zeros(self.length, bool) if self.ce_weights is None else self.ce_weights > 0

    @property
    def by_policy_loss(self) -> np.ndarray:
        """[T] bool: trained by the loss of reinforcement learning. The policy sampled these."""
        counts = self.loss_mask.astype(bool)
        return counts if self.ce_weights is None else counts & ~self.by_cross_entropy


COLUMNS: dict[str, tuple[np.dtype, float]] = {
    "ids": (np.dtype("int32"), 0),
    "loss_mask": (np.dtype("uint8"), 0),
    "logprobs": (np.dtype("float32"), 0.0),
    "advantages": (np.dtype("float32"), 0.0),
    "versions": (np.dtype("int32"), -1),
}
"""Type and padding value of each column of `Tokens`."""


def build_tokens(
    *,
    kept: Kept | None = None,
    routed: Routed | None = None,
    pictures: list[Picture] | None = None,
    top_logprobs: TopLogprobs | None = None,
    ce_weights: np.ndarray | None = None,
    oldest: np.ndarray | None = None,
    **columns: Any,
) -> Tokens:
    """Build tokens from sequences of numbers, each column cast to its type."""
    arrays: dict[str, Any] = {name: np.asarray(columns[name], dtype=dtype) for name, (dtype, _) in COLUMNS.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    assert len(set(lengths.values())) == 1, f"columns of different lengths: {lengths}"
    for each in (kept, top_logprobs):
        assert each is None or len(each.counts) == lengths["ids"], f"{len(each.counts)} counts, {lengths['ids']} ids"
    assert routed is None or len(routed.known) == lengths["ids"], f"routes of {len(routed.known)} tokens"
    lists: dict[str, Any] = {"kept": kept, "routed": routed, "pictures": pictures or [], "top_logprobs": top_logprobs}
    return Tokens(**arrays | lists, ce_weights=ce_weights, oldest=oldest)


def concat_tokens(parts: list[Tokens]) -> Tokens:
    """Return one row of several samples: places of pictures move along, gaps of `kept`, `routed` and `top_logprobs` are
    filled.

    Tokens of a sample without one of them count as sampled from the whole vocabulary, as of unknown experts, and as of
    a distribution that is not known.
    """
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    pictures: list[Picture] = []
    begin = 0
    for part in parts:
        pictures += [msgspec.structs.replace(each, place=begin + each.place) for each in part.pictures]
        begin += part.length
    has_oldest = any(part.oldest is not None for part in parts)
    return Tokens(
        **columns,
        kept=_concat_kept(parts),
        routed=_concat_routed(parts),
        pictures=pictures,
        top_logprobs=_concat_top_logprobs(parts),
        restrained=_concat_given(parts, "restrained", np.uint8),
        ce_weights=_concat_given(parts, "ce_weights", np.float32),
        oldest=np.concatenate([each.attended for each in parts]) if has_oldest else None,
    )


def _concat_kept(parts: list[Tokens]) -> Kept | None:
    if all(part.kept is None for part in parts):
        return None
    # A sample without lists was sampled from the whole vocabulary: no kept token at any place.
    kept = [part.kept or Kept(np.zeros(part.length, np.int32), np.zeros(0, np.int32)) for part in parts]
    return Kept(np.concatenate([each.counts for each in kept]), np.concatenate([each.ids for each in kept]))


def _concat_top_logprobs(parts: list[Tokens]) -> TopLogprobs | None:
    if all(part.top_logprobs is None for part in parts):
        return None
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    top = [part.top_logprobs or TopLogprobs(np.zeros(part.length, np.int32), *nothing) for part in parts]
    names = ("counts", "ids", "logprobs")
    return TopLogprobs(*(np.concatenate([getattr(each, name) for each in top]) for name in names))


def _concat_given(parts: list[Tokens], name: str, dtype: type[np.generic]) -> np.ndarray | None:
    """Return a column that only some samples have, 0 for the others; None if no sample has it."""
    columns = [getattr(part, name) for part in parts]
    if all(column is None for column in columns):
        return None
    pairs = zip(parts, columns, strict=True)
    return np.concatenate([np.zeros(part.length, dtype) if column is None else column for part, column in pairs])


def _concat_routed(parts: list[Tokens]) -> Routed | None:
    given = [part.routed for part in parts if part.routed is not None]
    if not given:
        return None
    shapes = {(routed.layers, routed.top_k) for routed in given}
    assert len(shapes) == 1, f"routes of (layers, experts of a token) {sorted(shapes)} in one row: of different models"
    ((layers, top_k),) = shapes
    known = [part.routed.known if part.routed else np.zeros(part.length, np.uint8) for part in parts]
    return Routed(np.concatenate(known), np.concatenate([routed.experts for routed in given]), layers, top_k)


class MicroBatch(msgspec.Struct, frozen=True):
    """One packed row for one rank: samples one after the other; attention never crosses from one into the next."""

    tokens: Tokens  # [T]
    lengths: list[int]  # [S], sums to T
    temperatures: list[float]  # [S]: the sampling temperature of each sample
    sources: list[str] = []  # [S]: the environment of each sample, if some have losses of their own


PULLED_KINDS = frozenset({"filesystem", "ipc"})
"""Kinds of weight transfer whose engines fetch after all has been sent; with the others they receive meanwhile."""


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, type and shape of one tensor that is sent.

    Example:
        TensorSpec(name="model.layers.0.mlp.up_proj.weight", dtype="float32", shape=[512, 128])
    """

    name: str
    dtype: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{1,31}\Z")]
    shape: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(max_length=8)]


class InitInfo(msgspec.Struct, frozen=True):
    """`init_info` of vLLM's `/init_weight_transfer_engine`: where and how an engine's workers join a transfer.

    Example:
        InitInfo("gloo", "127.0.0.1", 5556, "a1/7", rank_offset=1, world_size=3, bucket_bytes=1 << 26, timeout_s=600.0)
    """

    kind: str  # gloo | nccl | ipc | filesystem
    host: str  # address at which the sender's rendezvous listens
    port: int
    epoch: str  # names a set of peers: a receiver of the same address and epoch keeps its connections
    rank_offset: int  # rank of the engine's first worker; the sender is rank 0
    world_size: int  # ranks of all engines, and the sender
    bucket_bytes: int  # most bytes that travel at once
    timeout_s: float


class UpdateInfo(msgspec.Struct, frozen=True):
    """The tensors that an engine is to load, and where they are.

    Example:
        UpdateInfo([TensorSpec("model.norm.weight", "bfloat16", [64])], payload={"folder": "/runs/7/broadcast"})
    """

    specs: list[TensorSpec]  # in the order in which they are sent
    payload: dict[str, Any] = {}  # data for transfers of `PULLED_KINDS`: a folder, or memory handles


class Probe(msgspec.Struct, frozen=True):
    """A fixed prompt and the trainer's logprobs for it, with which those of an engine must agree."""

    ids: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(min_length=2)]  # [T]
    logprobs: list[float]  # [T - 1]: of ids[t + 1] after ids[:t + 1], at temperature 1
    noise: Annotated[float, Meta(ge=0)] = 0.0  # mean change of a logprob by rounding; 0 in float32
    noise_age: Annotated[int, Meta(ge=0)] = 0  # versions since the noise was measured


# Requests of the trainer to the orchestrator, and the answers.


class GetNewest(msgspec.Struct, frozen=True, tag=True):
    """A trainer that starts asks how far the run had come before."""

    run_id: str


class Newest(msgspec.Struct, frozen=True, tag=True):
    """The newest version that engines ever confirmed, and what it was: a trainer that starts from an older checkpoint
    replays up to it without publishing, and compares.

    Example:
        Newest(version=41, digests={"model.norm.weight": "9f…"})
        Newest(version=-1, digests={})  # nothing was ever confirmed
    """

    version: int
    digests: dict[str, str]


class GetBatch(msgspec.Struct, frozen=True, tag=True):
    """Rank `rank` of `world` asks for its share of batch `step`."""

    run_id: str
    step: Count
    rank: Rank
    world: Annotated[int, Meta(ge=1, le=1 << 16)]


class BatchReply(msgspec.Struct, frozen=True, tag=True):
    """This rank's micro-batches. Every rank gets equally many; an empty one has one token and no loss.

    Dividing by the whole batch's `loss_tokens` (or `loss_samples`), not this rank's, gives the same gradient however
    it is split.
    """

    step: int
    micro_batches: list[MicroBatch]
    loss_tokens: int  # tokens that the policy loss trains, in the whole batch; 1 if there is none
    num_rollouts: int
    loss_samples: int = 0  # samples with at least one such token, in the whole batch; 1 if there is none
    ce_tokens: int = 0  # tokens that cross-entropy trains, in the whole batch
    pictures: dict[str, bytes] = {}  # PNG files of this rank's rows, by their digests


class Publish(msgspec.Struct, frozen=True, tag=True):
    """The trainer must publish the version that it has before it gets the batch, or exits.

    An engine started without weights, or the version was never confirmed.
    """

    reason: str


class PolicyReady(msgspec.Struct, frozen=True, tag=True):
    """The trainer has version `version` and would send it now."""

    run_id: str
    version: Count
    incarnation: Name  # id of the trainer process; a new one means that the old connections are gone
    attempt: Count  # counts up with every transfer; the same number asks about the same one
    everywhere: bool  # also to engines that serve this version already
    specs: Annotated[list[TensorSpec], Meta(min_length=1)]
    kind: Annotated[str, Meta(pattern=r"^(gloo|nccl|ipc|filesystem)\Z")]
    host: Name  # address at which the trainer's rendezvous listens
    port: Annotated[int, Meta(ge=0, lt=1 << 16)]


class Go(msgspec.Struct, frozen=True, tag=True):
    """The engines are paused and receive: send now, in group `epoch` of `world_size` ranks (the sender is 0)."""

    version: int
    epoch: str  # names a set of peers; another one means: join again
    world_size: int


class PolicySent(msgspec.Struct, frozen=True, tag=True):
    """All tensors of `version` have been sent. Engines must report these digests and agree with the probe."""

    run_id: str
    version: Count
    attempt: Count
    digests: Annotated[dict[str, Annotated[str, Meta(pattern=r"^[!-~]{1,256}\Z")]], Meta(min_length=1)]
    probe: Probe
    payload: dict[str, Any] = {}  # data for transfers of `PULLED_KINDS`, as in `UpdateInfo`


class Again(msgspec.Struct, frozen=True, tag=True):
    """This attempt failed (an engine died in it, or the orchestrator restarted): the trainer begins another."""

    reason: str


class Live(msgspec.Struct, frozen=True, tag=True):
    """Every engine serves `version`, confirmed."""

    version: int


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The state and the waits of a process, once a second."""

    run_id: str
    process: Annotated[str, Meta(min_length=1, max_length=64)]
    state: Words
    version: Annotated[int, Meta(ge=-1)]
    waits: Annotated[list[Words], Meta(max_length=1 << 10)]
    busy: bool = False  # it waits for room on a disk; the deadlines of its peers are suspended


class Done(msgspec.Struct, frozen=True, tag=True):
    """The trainer has finished `version` = max_steps and exits."""

    run_id: str
    version: Count


class Ok(msgspec.Struct, frozen=True, tag=True):
    """The request was received, and asks for nothing more."""


class NotYet(msgspec.Struct, frozen=True, tag=True):
    """Ask again; `note` says what is missing ("24 of 64 rollouts missing").

    An orchestrator that is busy (with an evaluation, a full disk) has deadlines for that: the asker's deadline counts
    from the end of it.
    """

    note: str
    busy: bool = False


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Asking again would not help."""

    error: str


# Requests of an engine that joins a running run (`inference --join`), and the answers. None of them names the run: an
# engine knows it by its address alone.


class GetTerms(msgspec.Struct, frozen=True, tag=True):
    """An engine that would join asks what the run expects of it."""


class Terms(msgspec.Struct, frozen=True, tag=True):
    """The run, and a ticket with which one engine may join it."""

    run: str  # the tables of the run's configuration that an engine reads, as JSON
    ticket: Name


class Join(msgspec.Struct, frozen=True, tag=True):
    """An engine registers, before it loads its model. Sent again it changes nothing until its first `Beat`; from then
    on the ticket is spent, and a copy of this message is refused.

    Example:
        Join("9f3c…", "http://10.0.0.21:8000", {"vllm": "0.32.0", "inference.model.dtype": '"bfloat16"'})
    """

    ticket: Name
    url: Annotated[str, Meta(pattern=r"^http://[A-Za-z0-9.-]{1,253}:[0-9]{1,5}\Z")]  # address that its server will have
    facts: Annotated[
        dict[Name, Words], Meta(max_length=64)
    ]  # facts that engines of a run share, see `config/engine_facts.py`


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The engine is a member, in quarantine until it has confirmed the newest version."""

    member: Count  # its number, which no other engine of the run ever gets


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A member's process lives. Answered with `Ok`; `Again` if it is no member now, and may join again; `Dismissed`
    if it may not."""

    member: Count
    ticket: Name


class Leave(msgspec.Struct, frozen=True, tag=True):
    """A member would end. It gets no new requests, and `NotYet` until those under way are answered; then `Ok`."""

    member: Count
    ticket: Name
    at_once: bool  # its requests under way are sent to other engines instead


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """A member is to end: the run is over, or has sent it away."""

    reason: str
    is_over: bool


Membership = GetTerms | Join | Beat | Leave
Request = GetNewest | GetBatch | PolicyReady | PolicySent | Heartbeat | Done | Membership
Reply = Newest | BatchReply | Publish | Go | Again | Live | Ok | NotYet | Refusal | Terms | Joined | Dismissed


# Encoding.


def _encode(value: Any) -> Any:
    """Encode what msgspec does not know: arrays, and the configuration tables that the journal stores."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, np.ndarray):
        # A view, so that msgspec copies the bytes only once, into the message.
        return [value.dtype.str, np.ascontiguousarray(value).reshape(-1).data.cast("B")]
    raise TypeError(f"cannot send a {type(value)}")


def _decode(kind: type, value: Any) -> Any:
    if issubclass(kind, BaseModel):
        return kind.model_validate(value)
    if kind is np.ndarray:
        dtype, data = value
        # A view into the bytes that were received, so arrays are read-only.
        return np.frombuffer(data, dtype=np.dtype(dtype))
    raise TypeError(f"cannot receive a {kind}")


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_encode).encode
decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request, dec_hook=_decode).decode
decode_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(Reply, dec_hook=_decode).decode


def decode_as(kind: Any, data: bytes) -> Any:
    """Decode a value that was stored, not sent."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode)
