"""Memory of one rank of the trainer by part, in bytes, and how a configuration sets it.

The parts are those at the moments of a step at which it may need most. FSDP2, as `trainer/model/sharding.py` sets it
up, keeps parameters, gradients and optimizer state in parts. One layer, and what lies outside of the layers, is whole
while it is in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from trireme.algo.model.activations import (
    SHORT,
    Pass,
    kept_by_attention,
    kept_by_layer,
    kept_by_matrices,
    layer_input,
    needs_mask,
)
from trireme.algo.model.architecture import Architecture, Layer
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.trainer import STATE_CHUNK, Lora, TrainerConfig, TrainerModel
from trireme.tools.plan.engine_memory import Parts, digest_bytes
from trireme.tools.plan.sizes import BYTES

MASTER_BYTES = 4  # bytes of a parameter that is trained, and of its gradient: float32
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 3 * 4 / 128, "muon": 4.0, "sgd": 4.0, "sign_sgd": 0.0}
"""Bytes of the optimizer's state per parameter. In 8 bits, 3 float32 numbers for every 128 values are included."""
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Training:
    """Sizes that decide the memory of training a model.

    Example:
        Training(model, Pass(tokens=16384, value_bytes=2), shards=4, optimizer="adamw_8bit")
    """

    model: Architecture
    row: Pass
    settings: TrainerModel = field(default_factory=TrainerModel)  # memory is counted as if `compile` were off
    shards: int = 1
    rows: int = 2  # rows of a rank per update; from the second on, it holds the gradients of those before
    frozen_bytes: int = 2  # bytes of a parameter that is not trained, in the precision of the computation
    optimizer: Literal["adamw", "adamw_8bit", "muon", "sgd", "sign_sgd"] = "adamw"
    offloads_state: bool = False  # the optimizer's, to CPU memory
    trained_whole: int = 0  # parameters of modules that are trained besides adapters
    has_reference: bool = False
    served_bytes: int = 2
    bucket_bytes: int | None = 64 << 20  # None: engines read a copy of the whole model (CUDA IPC)

    @property
    def reduce_bytes(self) -> int:
        return BYTES[self.settings.reduce_dtype]

    @property
    def trained(self) -> int:
        """Return the number of parameters that are trained."""
        if self.row.targets is None:
            return self.model.num_parameters - self.frozen_tower
        return self.model.adapter_parameters(self.row.rank, self.row.targets) + self.trained_whole

    @property
    def frozen(self) -> int:
        """Return the number of parameters that adapters leave as they are."""
        return 0 if self.row.targets is None else self.model.num_parameters - self.trained_whole

    @property
    def frozen_tower(self) -> int:
        """Return the number of parameters of a vision encoder that is left as it is though the rest is trained whole.
        They are held in float32. The activations of an encoder that is trained are not counted."""
        return 0 if self.frozen or self.settings.trains_vision_encoder else self.model.tower

    @property
    def weight_bytes(self) -> float:
        return (MASTER_BYTES * (self.trained + self.frozen_tower) + self.frozen_bytes * self.frozen) / self.shards

    @property
    def gradient_bytes(self) -> float:
        return MASTER_BYTES * self.trained / self.shards

    @property
    def optimizer_bytes(self) -> float:
        if self.optimizer != "muon":
            return MOMENT_BYTES[self.optimizer] * self.trained / self.shards
        # Muon is for matrices: AdamW takes the rest (embedding, head, norms).
        layers = sum(layer.matrix_parameters for layer in self.model.layers)
        matrices = layers if self.row.targets is None else self.trained - self.trained_whole
        return (MOMENT_BYTES["muon"] * matrices + MOMENT_BYTES["adamw"] * (self.trained - matrices)) / self.shards

    @cached_property
    def moments(self) -> dict[str, Parts]:
        """Return the parts on the rank's device at each moment of a step, in the order in which they are shown."""
        model, row, layer = self.model, self.row, self.model.largest_layer
        value_bytes, tokens, embedding = row.value_bytes, row.own_tokens, self.model.embedding

        # These parts are there at all moments.
        settled = {"weights": self.weight_bytes, "optimizer": self.optimizer_bytes}
        fetched = 0.0  # state of the parameters at work, and of those before, until it is copied
        if self.offloads_state:
            fetched = min(self.optimizer_bytes, 2 * STATE_CHUNK * MOMENT_BYTES["adamw"] / MASTER_BYTES)
            settled["optimizer"] = 0.0
        if self.has_reference:  # with adapters, the base model is there already, and the copy is of these
            settled["reference"] = self.gradient_bytes
        if self.settings.fsdp_cpu_offload:
            settled = dict.fromkeys(settled, 0.0)
        gradients = 0.0 if self.settings.fsdp_cpu_offload else self.gradient_bytes
        before = gradients if self.rows > 1 else 0.0  # those of the rows before

        is_masked = any(each.attends and needs_mask(model, each, row) for each in model.layers)
        mask = float(row.tokens**2) if is_masked else 0.0
        by_layer = [_kept(self, number) for number in range(len(model.layers))]
        kept = (2 * max(by_layer) if self.settings.activation_offload else sum(by_layer)) + mask

        # The last norm keeps its input, and the head its hidden states with their gradient.
        final = tokens * model.hidden * (4 + 3 * value_bytes)
        # The layer at work computes again what it did not keep.
        whole = kept_by_layer(model, layer, row)
        ac = self.settings.ac
        still = kept_by_matrices(model, layer, row) if ac and ac.mode == "selective" else 0.0
        again = max(0.0, whole - still) if ac else 0.0
        # A layer's activations have most gradients in the MLP: those of gate, up and their product.
        down = max(layer.matrices, key=lambda matrix: (matrix.name == "down_proj", matrix.used * matrix.inputs))
        between = tokens * value_bytes * 2 * down.used * (down.inputs + model.hidden)

        # Head and vision encoder are whole all through a pass; a separate embedding only while it is at work.
        root = value_bytes * (embedding + model.hidden + model.tower)
        gathered = root + _gathered(self, layer)
        head_gradient = reduction = 0.0
        if row.targets is None:
            # The head's gradient waits for the embedding's, with which it is reduced.
            head_gradient = value_bytes * embedding
            # A gradient is laid out to be reduced, next to this rank's part. A tied embedding adds up two.
            laid_out = value_bytes + self.reduce_bytes * (1 + 1 / self.shards)
            reduction = embedding * (laid_out + value_bytes * model.tied)
            reduction += model.tower * laid_out * self.settings.trains_vision_encoder

        # In the first row, this layer's gradient is not there yet.
        others = gradients if self.rows > 1 else gradients * (len(model.layers) - 1) / len(model.layers)

        update = 0.0
        if self.optimizer == "muon":  # several copies of a whole matrix; fused kernels of the others need nothing
            update = 4.0 * MASTER_BYTES * max(matrix.weights for each in model.layers for matrix in each.matrices)

        # The largest tensor is there whole: as it is held, as it is sent, and for its digest. What was sent before it
        # is in two buckets, or with memory handles in a copy of the model.
        sent, largest = self.served_bytes * model.num_parameters, self.served_bytes * model.largest_tensor
        transfers: float = model.largest_tensor * MASTER_BYTES + largest + digest_bytes(largest)
        transfers += sent if self.bucket_bytes is None else 2.0 * self.bucket_bytes

        return {
            "head": settled
            | {"gradients": before, "activations": kept + final, "gathered": root, "logits": _logits(self)},
            "first layer backward": settled
            | {"gradients": before + head_gradient, "activations": kept + again + between, "gathered": gathered},
            "last layer backward": settled
            | {
                "gradients": others + head_gradient,
                "activations": kept_by_attention(model, layer, row) + mask,
                "gathered": root + _gathered_or_reduced(self, layer),
            },
            "embedding backward": settled | {"gradients": gradients + reduction, "gathered": root, "activations": 0.0},
            "update": settled | {"gradients": gradients, "update": update + fetched},
            "publish": settled | {"transfers": transfers},
        }

    @property
    def fullest(self) -> str:
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> Parts:
        return self.moments[self.fullest]

    @property
    def host(self) -> Parts:
        """Return what the rank needs of its machine's memory: checkpoints are staged there, and what is offloaded lives
        there."""
        values = self.gradient_bytes
        # A checkpoint holds the trained parameters, as many bytes as their gradients, and the optimizer.
        parts = {"checkpoint": values + self.optimizer_bytes}
        if self.settings.fsdp_cpu_offload:
            parts["parameters"] = self.weight_bytes + self.optimizer_bytes + values
            parts["parameters"] += values if self.has_reference else 0.0
        if self.offloads_state:
            parts["optimizer"] = self.optimizer_bytes
        if self.settings.activation_offload:
            parts["activations"] = sum(_kept(self, number) for number in range(len(self.model.layers)))
        return parts


def _kept(training: Training, number: int) -> float:
    """Return what a layer keeps for its backward pass."""
    layer, ac = training.model.layers[number], training.settings.ac
    if ac is None or number % ac.freq:
        return kept_by_layer(training.model, layer, training.row)
    if ac.mode == "selective":
        return kept_by_matrices(training.model, layer, training.row)
    return layer_input(training.model, training.row)


def _logits(training: Training) -> float:
    """Return the bytes of a chunk's logits, of their logprobs in float32, and of the gradient of these, from which the
    head's gradient is made.

    With several chunks and a trained head, the sum of the head's gradients is there too, in float32.
    """
    row, model = training.row, training.model
    values = min(training.settings.head_chunk, row.own_tokens) * model.vocabulary
    chunk = values * (8.0 + row.value_bytes)

    # Adapters leave the head as it is, so it has no gradient.
    if row.targets is not None:
        return chunk
    sums = 4.0 * model.embedding if row.own_tokens > training.settings.head_chunk else 0.0
    return sums + max(chunk, row.value_bytes * (values + model.embedding))


def _gathered(training: Training, layer: Layer) -> float:
    """Return the layer at work and, if there are several ranks, the next one, which is fetched meanwhile."""
    # Without resharding a layer stays whole after its forward pass.
    if not training.settings.reshard_after_forward:
        return training.row.value_bytes * sum(each.num_parameters for each in training.model.layers)
    return (2 if training.shards > 1 else 1) * training.row.value_bytes * layer.num_parameters


def _gathered_or_reduced(training: Training, layer: Layer) -> float:
    """Return the larger of two moments: the layer whole, with its gradient, while that of the one before is reduced.
    Or, once the layer has been released, its gradient as it is laid out, and this rank's part of it."""
    num_layers = len(training.model.layers)
    values = training.trained / num_layers if training.frozen else layer.num_parameters
    whole, laid_out = training.row.value_bytes * values, training.reduce_bytes * values
    before = laid_out if num_layers > 1 else 0.0
    return max(_gathered(training, layer) + whole + before, laid_out * (1 + 1 / training.shards))


def training_of(config: RunConfig | SftConfig, model: Architecture, *, rows: int, packed: bool = True) -> Training:
    """Return the sizes of training that a configuration sets.

    Args:
        rows: number of rows that a rank trains on before it updates.
        packed: whether a row has several samples.
    """
    trainer: TrainerConfig | SftConfig
    if isinstance(config, RunConfig):
        trainer, broadcast = config.trainer, config.weight_broadcast
        has_reference = any(own.trainer.loss.beta for own in config.losses.values())
        served_bytes = BYTES[config.served_dtype]
        bucket_bytes = None if broadcast.type == "ipc" else broadcast.bucket_mib << 20
    else:
        # A supervised run sends no weights to engines.
        trainer, has_reference, served_bytes, bucket_bytes = config, False, 2, 0

    on_cpu, settings, lora = config.device == "cpu", trainer.model, trainer.model.lora
    value_bytes = BYTES[settings.optimization_dtype]
    targets = lora.target_modules if lora else None
    if targets and ALL_LINEAR in targets:
        targets = tuple({matrix.name for layer in model.layers for matrix in layer.matrices})

    return Training(
        model,
        Pass(
            tokens=trainer.micro_batch_tokens or config.seq_len,
            value_bytes=value_bytes,
            attention=settings.attn,
            packed=packed,
            cp=settings.cp,
            targets=targets,
            rank=lora.rank if lora else 0,
            dropout=bool(lora and lora.dropout),
            # A CPU writes the scores of short samples out: this is the length at which they take most.
            sample=min(config.seq_len, SHORT[value_bytes]) if on_cpu else 0,
        ),
        settings=settings,
        shards=max(1, (trainer.num_ranks or 1) // settings.dp_replicate),
        rows=rows,
        frozen_bytes=value_bytes,
        optimizer=trainer.optim.type,
        offloads_state=trainer.optim.cpu_offload and not on_cpu,
        trained_whole=_trained_whole(lora, model) if lora else 0,
        has_reference=has_reference,
        served_bytes=4 if on_cpu else served_bytes,
        bucket_bytes=bucket_bytes,
    )


def _trained_whole(lora: Lora, model: Architecture) -> int:
    """Return the parameters of `modules_to_save`; an embedding that is the head too counts once."""
    ends = {name.rpartition(".")[2] for name in lora.modules_to_save}
    tables = ends & {"embed_tokens", "lm_head"}
    matrices = (matrix for layer in model.layers for matrix in layer.matrices if matrix.name in ends)
    count = min(1, len(tables)) if model.tied else len(tables)
    return count * model.embedding + sum(matrix.num_parameters for matrix in matrices)
