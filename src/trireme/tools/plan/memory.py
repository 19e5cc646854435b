"""What one rank of the trainer needs, by part, at the moments of a step at which it may need most.

FSDP2 as `trainer.sharding` sets it up: parameters, gradients and optimizer state in parts; one layer, and what lies
outside of the layers, whole while they are worked with. All in bytes.

P parameters of a layer; H hidden size, V vocabulary; S ranks among which the model is divided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from trireme.algo.activations import Pass, kept_by_attention, kept_by_layer, kept_by_matrices, layer_input, needs_mask
from trireme.algo.architecture import Architecture, Layer

GIB = 1 << 30
MASTER_BYTES = 4  # of a parameter that is trained, and of its gradient: float32
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 3 * 4 / 128, "muon": 4.0, "sgd": 4.0}
"""Bytes of the optimizer's state per parameter. In 8 bits, 3 float32 numbers for every 128 values are included."""

Parts = dict[str, float]


@dataclass(frozen=True)
class Training:
    """How a model is trained, in numbers.

    Example:
        Training(model, Pass(tokens=16384, value_bytes=2), shards=4, optimizer="adamw_8bit", ac_freq=1)
    """

    model: Architecture
    row: Pass
    shards: int = 1
    rows: int = 2  # that a rank goes through before it updates; from the second on there are gradients of all before
    ep: int = 1
    reduce_bytes: int = 4
    frozen_bytes: int = 2  # of a parameter that is not trained: as it is computed with
    optimizer: Literal["adamw", "adamw_8bit", "muon", "sgd"] = "adamw"
    trained_whole: int = 0  # parameters of modules trained beside adapters
    ac_freq: int | None = None
    ac_mode: Literal["full", "selective"] = "full"
    offload_activations: bool = False
    offload_parameters: bool = False
    reshard: bool = True
    head_chunk: int = 1024
    has_reference: bool = False
    served_bytes: int = 2
    bucket_bytes: int | None = 64 << 20  # None: engines read a copy of the whole model (CUDA IPC)
    compiled: bool = False

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        if self.row.targets is None:
            return self.model.num_parameters
        return self.model.adapter_parameters(self.row.rank, self.row.targets) + self.trained_whole

    @property
    def frozen(self) -> int:
        return 0 if self.row.targets is None else self.model.num_parameters - self.trained_whole

    @property
    def matrices_with_muon(self) -> int:
        """The rest (embedding, head, norms) is AdamW's."""
        if self.row.targets is not None:
            return self.trained - self.trained_whole
        return sum(layer.matrix_parameters for layer in self.model.layers)

    @property
    def is_head_trained(self) -> bool:
        return self.row.targets is None

    @cached_property
    def memory(self) -> TrainerMemory:
        return TrainerMemory(_moments(self), _host(self))


@dataclass(frozen=True)
class TrainerMemory:
    """By moment of a step, then by part; and what a rank needs of its machine's own memory meanwhile."""

    moments: dict[str, Parts]
    host: Parts

    @property
    def fullest(self) -> str:
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> Parts:
        return self.moments[self.fullest]

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


def _moments(training: Training) -> dict[str, Parts]:
    """Parts in the order in which they are shown."""
    settled = _settled(training)
    gradients = 0.0 if training.offload_parameters else MASTER_BYTES * training.trained / training.shards
    before = gradients if training.rows > 1 else 0.0
    kept, layer = _kept(training), _heaviest(training)
    root = _root(training)
    return {
        "head": settled
        | {"gradients": before, "activations": kept + _final(training), "gathered": root, "logits": _logits(training)},
        "first layer backward": settled
        | {
            "gradients": before + _root_gradient(training),
            "activations": kept + _made_again(training, layer) + _between(training, layer),
            "gathered": root + _gathered(training, layer),
        },
        "last layer backward": settled
        | {
            "gradients": _of_other_layers(training, gradients) + _root_gradient(training),
            "activations": kept_by_attention(training.model, layer, training.row) + _mask(training),
            "gathered": root + _gathered_or_reduced(training, layer),
        },
        "embedding backward": settled
        | {"gradients": gradients + _root_reduction(training), "gathered": root, "activations": 0.0},
        "update": settled | {"gradients": gradients, "update": _update(training)},
        "publish": settled | {"transfers": _publishing(training)},
    }


def _settled(training: Training) -> Parts:
    """What is there all the time, from the first update on."""
    if training.offload_parameters:
        return {"weights": 0.0, "optimizer": 0.0} | ({"reference": 0.0} if training.has_reference else {})
    parts = {"weights": _weights(training), "optimizer": _state(training)}
    if training.has_reference:
        parts["reference"] = _reference(training)
    return parts


def _weights(training: Training) -> float:
    return (MASTER_BYTES * training.trained + training.frozen_bytes * training.frozen) / training.shards


def _state(training: Training) -> float:
    per_value = MOMENT_BYTES[training.optimizer]
    if training.optimizer != "muon":
        return per_value * training.trained / training.shards
    others = training.trained - training.matrices_with_muon
    return (per_value * training.matrices_with_muon + MOMENT_BYTES["adamw"] * others) / training.shards


def _reference(training: Training) -> float:
    """A copy that is not trained; with adapters, the base model is there already, and the copy is of these."""
    return MASTER_BYTES * training.trained / training.shards


# activations


def _is_again(training: Training, number: int) -> bool:
    """Whether the layer computes its activations anew in the backward pass."""
    return training.ac_freq is not None and number % training.ac_freq == 0


def _kept(training: Training) -> float:
    """By all layers, at the end of the forward pass, and the mask, which they share."""
    if training.offload_activations:
        largest = max(_kept_of(training, number) for number in range(len(training.model.layers)))
        return 2 * largest + _mask(training)
    return _all_kept(training) + _mask(training)


def _all_kept(training: Training) -> float:
    return sum(_kept_of(training, number) for number in range(len(training.model.layers)))


def _kept_of(training: Training, number: int) -> float:
    layer = training.model.layers[number]
    if not _is_again(training, number):
        return kept_by_layer(training.model, layer, training.row)
    if training.ac_mode == "selective":
        return kept_by_matrices(training.model, layer, training.row)
    return layer_input(training.model, training.row)


def _mask(training: Training) -> float:
    """Which token may see which: a byte each."""
    masked = any(needs_mask(training.model, layer, training.row) for layer in training.model.layers)
    return float(training.row.tokens**2) if masked else 0.0


def _made_again(training: Training, layer: Layer) -> float:
    """The layer at work computes again what it did not keep."""
    if training.ac_freq is None:
        return 0.0
    whole = kept_by_layer(training.model, layer, training.row)
    kept = kept_by_matrices(training.model, layer, training.row) if training.ac_mode == "selective" else 0.0
    return max(0.0, whole - kept)


def _between(training: Training, layer: Layer) -> float:
    """Gradients of a layer's activations, where they are most: in the MLP, of gate, up and what they made."""
    row, model = training.row, training.model
    down = next(matrix for matrix in layer.matrices if matrix.name == "down_proj")
    width = down.inputs * down.used
    return row.own_tokens * (row.value_bytes * (2 * width + 2 * model.hidden * down.used))


def _final(training: Training) -> float:
    """What the last norm keeps, and the hidden states that the head sees, with their gradient."""
    row, hidden = training.row, training.model.hidden
    return row.own_tokens * hidden * (4 + 3 * row.value_bytes)


def _logits(training: Training) -> float:
    """Of a chunk: the logits, their logprobs in float32, and the gradient of these; of which that of the head is made.

    Where there are several chunks, and the head is trained, the sum of its gradients too, in float32.
    """
    row, model = training.row, training.model
    values = min(training.head_chunk, row.own_tokens) * model.vocabulary
    chunk = values * (8.0 + row.value_bytes)
    if not training.is_head_trained:
        return chunk
    several = row.own_tokens > training.head_chunk
    sums = 4.0 * model.embedding if several else 0.0
    return sums + max(chunk, row.value_bytes * (values + model.embedding))


# the model at work


def _heaviest(training: Training) -> Layer:
    return training.model.largest_layer


def _layer_values(training: Training, layer: Layer) -> float:
    """Parameters that a rank gathers of a layer."""
    experts = sum(matrix.num_parameters for matrix in layer.matrices if matrix.is_expert)
    return layer.num_parameters - experts + experts / training.ep


def _gathered(training: Training, layer: Layer) -> float:
    """The layer at work, and, where there are several ranks, the next one, which is fetched meanwhile."""
    if not training.reshard:
        return training.row.value_bytes * sum(_layer_values(training, each) for each in training.model.layers)
    layers = 2 if training.shards > 1 else 1
    return layers * training.row.value_bytes * _layer_values(training, layer)


def _root(training: Training) -> float:
    """The head, which is gathered all through a pass; an embedding of its own is gathered only while it is at work."""
    return training.row.value_bytes * (training.model.embedding + training.model.hidden)


def _root_gradient(training: Training) -> float:
    """Waits for the embedding's, with which it is reduced."""
    return training.row.value_bytes * training.model.embedding if training.is_head_trained else 0.0


def _root_reduction(training: Training) -> float:
    """Its gradient, laid out to be reduced, and this rank's part. Where head and embedding are one, two add up."""
    if not training.is_head_trained:
        return 0.0
    whole = training.row.value_bytes * (2 if training.model.tied else 1) + training.reduce_bytes
    return training.model.embedding * (whole + training.reduce_bytes / training.shards)


def _gathered_or_reduced(training: Training, layer: Layer) -> float:
    """The layer, its own gradient, whole, and that of the layer before it, which is laid out and being reduced. Or,
    when the layer has been let go of: its gradient laid out, and this rank's part of it."""
    values = training.trained / len(training.model.layers) if training.frozen else _layer_values(training, layer)
    whole, laid_out = training.row.value_bytes * values, training.reduce_bytes * values
    before = laid_out if len(training.model.layers) > 1 else 0.0
    return max(_gathered(training, layer) + whole + before, laid_out * (1 + 1 / training.shards))


def _of_other_layers(training: Training, gradients: float) -> float:
    """In the first row, this layer's gradient is not there yet."""
    layers = len(training.model.layers)
    return gradients if training.rows > 1 else gradients * (layers - 1) / layers


# between steps


def _update(training: Training) -> float:
    """What an update makes on the way: fused kernels need nothing; Muon one matrix whole, several times."""
    if training.optimizer == "muon":
        largest = max((matrix.weights for layer in training.model.layers for matrix in layer.matrices), default=0)
        return 4.0 * MASTER_BYTES * largest
    return 0.0


def _publishing(training: Training) -> float:
    """The largest tensor whole, as it is held and as it is sent; and two buckets, or all that was sent."""
    sent = training.served_bytes * training.model.num_parameters
    beside = sent if training.bucket_bytes is None else 2.0 * training.bucket_bytes
    return training.model.largest_tensor * (MASTER_BYTES + training.served_bytes) + beside


def _host(training: Training) -> Parts:
    """Of one rank: checkpoints are staged there, and what is offloaded lives there."""
    values = training.trained / training.shards
    parts = {"checkpoint": values * MASTER_BYTES + _state(training)}
    if training.offload_parameters:
        parts["parameters"] = _weights(training) + _state(training) + values * MASTER_BYTES
        parts["parameters"] += _reference(training) if training.has_reference else 0.0
    if training.offload_activations:
        parts["activations"] = _all_kept(training)
    return parts


def changed(training: Training, **changes: object) -> Training:
    """A copy with other settings; those of `Pass` by their names too."""
    of_row = {name: value for name, value in changes.items() if name in Pass.__dataclass_fields__}
    others = {name: value for name, value in changes.items() if name not in of_row}
    return replace(training, row=replace(training.row, **of_row), **others)  # type: ignore[arg-type]
