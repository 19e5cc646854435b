"""Memory of activations: what a layer keeps for its backward pass, tensor by tensor, as transformers' layers do.

Per token, in bytes, at the precision of the forward pass (`optimization_dtype`). Norms compute in float32, and keep
their input in it. A test holds the sum against what autograd really keeps, family by family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trireme.algo.model.architecture import Architecture, Layer, Matrix, is_target

Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]


SHORT = {2: 192, 4: 64}
"""Tokens of a sample up to which a CPU has attention written out, by bytes of a number:
`trainer/model/packing/attention.py`."""


@dataclass(frozen=True)
class Pass:
    """The settings of a row's forward and backward pass.

    Example:
        Pass(tokens=16384, value_bytes=2, attention="flash_attention_2", packed=True)
    """

    tokens: int  # tokens of the row, on all ranks that share it
    value_bytes: int  # 2 in bfloat16, 4 in float32
    attention: Attention = "sdpa"
    packed: bool = True  # several samples in the row
    cp: int = 1  # ranks that share the row
    targets: tuple[str, ...] | None = None  # matrices with an adapter; None if the whole model is trained
    rank: int = 0  # rank of the adapters
    dropout: bool = False  # in front of the adapters
    sample: int = 0  # on a CPU: tokens of each sample of a packed row

    @property
    def own_tokens(self) -> int:
        return -(-self.tokens // self.cp)

    @property
    def frozen(self) -> bool:
        return self.targets is not None


def kept_by_layer(model: Architecture, layer: Layer, row: Pass) -> float:
    """Return all bytes that autograd keeps of one layer.

    Of a counted model (see `Architecture`) it is an estimate: inputs and results of all matrices and of attention, and
    what a recurrence keeps.
    """
    if model.is_counted:
        # What a layer does inside is unknown, so each matrix counts by its own inputs and results.
        kept = sum(each.used * (each.inputs * _is_trained(each, row) + each.outputs) for each in layer.matrices)
        kept += (2 * model.query + model.key) * layer.attends + model.hidden
        scores = scores_bytes(model, layer, row) if layer.attends else 0.0
        per_token = _norms(model, row) + row.value_bytes * kept + _adapters(layer, row) + 4 * layer.recurrence
        return row.own_tokens * per_token + scores
    per_token = _norms(model, row) + _attention(model, layer, row) + _inputs(layer, row) + _inside(model, layer, row)
    return row.own_tokens * per_token + scores_bytes(model, layer, row)


def kept_by_attention(model: Architecture, layer: Layer, row: Pass) -> float:
    """Return the same without the MLP, whose backward pass is done first.

    The MLP of a counted model may have any names, so it is included.
    """
    if model.is_counted:
        return kept_by_layer(model, layer, row)
    return kept_by_layer(model, layer, row) - row.own_tokens * _inside(model, layer, row)


def kept_by_matrices(model: Architecture, layer: Layer, row: Pass) -> float:
    """Return the bytes of the results of matrix products and attention, which selective checkpointing keeps.

    It keeps none of the experts' products, which are another operation. Attention that is written out is two products,
    of which one is its scores.
    """
    outputs = sum(matrix.outputs for matrix in layer.matrices if not matrix.is_expert)
    scores = row.value_bytes * row.sample if _is_written_out(model, row) else 4
    per_token = row.value_bytes * (outputs + model.query) + scores * model.heads
    return row.own_tokens * per_token + row.value_bytes * row.own_tokens * model.hidden


def layer_input(model: Architecture, row: Pass) -> float:
    """Return what full checkpointing keeps."""
    return row.own_tokens * model.hidden * row.value_bytes


def scores_bytes(model: Architecture, layer: Layer, row: Pass) -> float:
    """Return what grows with the square of a row: `eager` keeps all scores; `sdpa` its mask, as numbers, once per
    layer; attention that is written out keeps each token's weights on its sample.
    """
    pairs = row.tokens * row.tokens
    if row.attention == "eager":
        softmax = 0 if model.family.sinks else 4  # in float32, but for gpt-oss
        kept = row.value_bytes * (2 if model.capped else 1) + (softmax if row.value_bytes != 4 else 0)
        return pairs * model.heads / row.cp * kept
    if _is_written_out(model, row):
        return row.tokens * row.sample * model.heads * row.value_bytes
    return pairs * row.value_bytes if needs_mask(model, layer, row) else 0.0


def needs_mask(model: Architecture, layer: Layer, row: Pass) -> bool:
    """Return whether `sdpa` builds a mask: samples do not attend one by one, or the layer has a window."""
    windowed = layer.window is not None and layer.window < row.tokens
    return row.attention == "sdpa" and (_is_masked(model, row) or windowed)


def _is_masked(model: Architecture, row: Pass) -> bool:
    """Return whether samples share the row and only a mask keeps them from attending to one another."""
    return row.attention == "sdpa" and row.packed and not model.attends_apart(row.attention, row.cp)


def _is_written_out(model: Architecture, row: Pass) -> bool:
    """Return whether samples attend one by one, and are so short that a CPU writes their attention out."""
    is_short = 0 < row.sample <= SHORT.get(row.value_bytes, 0)
    return is_short and row.packed and model.attends_apart(row.attention, row.cp)


def _norms(model: Architecture, row: Pass) -> float:
    """Return what norms keep: their input, their result before scaling (if it is trained), and a number per token.

    The input of the norms before attention and MLP is the residual stream.
    """
    norms = [(model.hidden, 1)] * model.family.layer_norms
    if model.family.qk_norm:
        norms += [(model.query, model.heads), (model.key, model.kv_heads)]
    scaled = 4 if model.family.wide_norms else row.value_bytes
    return sum(width * (4 + (0 if row.frozen else scaled)) + 4 * groups for width, groups in norms)


def _attention(model: Architecture, layer: Layer, row: Pass) -> float:
    """Return what attention keeps: queries, keys and values after the rotation, the result, and a number per head.

    Ranks that share a row have all its tokens of some heads in attention, which are as many numbers; a rank has one
    head of keys at least.
    """
    repeated = row.attention == "eager" or _is_masked(model, row)
    keys = model.query if repeated else model.key * max(1.0, row.cp / model.kv_heads)
    output = next(matrix for matrix in layer.matrices if matrix.name == "o_proj")

    # Fused kernels need the result in their backward pass, and so does the matrix after them if it is trained.
    fused = row.attention != "eager" and not _is_written_out(model, row)
    results = 2 if fused or _is_trained(output, row) else 1
    if fused and row.packed and model.attends_apart(row.attention, row.cp) and _is_trained(output, row):
        results += 1  # one copy in the order of the samples, one in that of the row
    return row.value_bytes * (results * model.query + 2 * keys) + (4 * model.heads if fused else 0)


def _inputs(layer: Layer, row: Pass) -> float:
    """Return the inputs of linear layers that are trained, or have adapters; q, k and v share one, as do gate and up.

    That of o is the result of attention, which is kept anyway.
    """
    named = {matrix.name: matrix for matrix in layer.matrices if not matrix.is_expert}
    groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "router"), ("down_proj",))
    total = 0.0
    for group in groups:
        # Matrices of a group read the same tensor, which is kept once if any of them needs it.
        trained = [named[name] for name in group if name in named and _is_trained(named[name], row)]
        if trained:
            total += row.value_bytes * trained[0].inputs
    return total + _adapters(layer, row)


def _is_trained(matrix: Matrix, row: Pass) -> bool:
    return row.targets is None or is_target(matrix, row.targets)


def _adapters(layer: Layer, row: Pass) -> float:
    """Return the tensor between the two matrices of each adapter; with dropout, also its input and its mask."""
    if row.targets is None:
        return 0.0
    chosen = [matrix for matrix in layer.matrices if not matrix.is_expert and is_target(matrix, row.targets)]
    dropped = sum(matrix.inputs * (row.value_bytes + 1) for matrix in chosen) if row.dropout else 0
    return row.value_bytes * row.rank * len(chosen) + dropped


def _inside(model: Architecture, layer: Layer, row: Pass) -> float:
    """Return what the MLP keeps: gate, up, the activated gate, and the product of both, which is an input."""
    down = next(matrix for matrix in layer.matrices if matrix.name == "down_proj")
    width, used = down.inputs, down.used
    if layer.experts is None:
        return row.value_bytes * width * 3

    # Of each expert that a token is sent to: its input, gate and up, their product, and the result.
    inner = width * (2 + model.family.gate_tensors - (1 if row.frozen else 0))
    outside = model.hidden * (1 if row.frozen else 2)
    routing = 8 * down.copies + 24 * used  # float32 scores twice, and the places of each token
    return row.value_bytes * used * (inner + outside) + routing
