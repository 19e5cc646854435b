"""Rows of prime-rl's `sft` and `evals`, which have tables of `rl` at their top."""

from __future__ import annotations

from typing import Any

from trireme.config.nested import value_at
from trireme.config.rows import prime_rl
from trireme.config.rows.rules import HARDWARE, on_gpus, only
from trireme.config.rows.sources import ENGINES, set_count
from trireme.config.sft import FAKE, FAKE_OF_ANY_LENGTH
from trireme.config.translation import Refused, Row, Settings, refused, spread


def set_sources(name: str, table: dict[str, Any]) -> Settings:
    """One data set, or several subsets and splits of it, each of which is a source here."""
    data = table.get("data", {})
    subsets, splits = (data.get(key) or [None] for key in ("subsets", "splits"))
    if data.get("probabilities") and len(subsets) * len(splits) > 1:
        raise Refused("its `probabilities` are not here: `[[source]]` has `repeat`, how often an epoch holds each.")
    if len(subsets) == len(splits) == 1:
        given = {"data": name, "subset": subsets[0], "split": splits[0]}
        return {key: value for key, value in given.items() if value is not None}

    # They are zipped if there are as many of one as of the other, else each subset has each split.
    longest = max(len(subsets), len(splits))
    pairs = [(subsets[i % len(subsets)], splits[i % len(splits)]) for i in range(longest)]
    keys = ("subset", "split")
    return {
        "source": [
            {"data": name} | {key: value for key, value in zip(keys, pair, strict=True) if value is not None}
            for pair in pairs
        ]
    }


def set_rows(samples: int, table: dict[str, Any]) -> Settings:
    return {"micro_batch_tokens": samples * (value_at(table, ("data", "seq_len")) or table.get("seq_len") or 128)}


def set_roles(mask: dict[str, bool], table: dict[str, Any]) -> Settings:
    usual = {"system": False, "user": False, "assistant": True, "tool": False}
    return {"loss_on": [role for role, trains in (usual | mask).items() if trains]}


def set_type(kind: str, table: dict[str, Any]) -> Settings | str:
    if kind != "fake":
        return "conversations"
    varies = value_at(table, ("data", "length")) == "variable"
    return {"data": FAKE_OF_ANY_LENGTH if varies else FAKE}


ENGINE = "one engine evaluates, on the GPU after those of the ranks; without one it shares the last"

DATA = spread(
    Row("data.path data.file", "data"),
    Row("data.name", set_sources),
    Row("data.type", set_type),
    Row("data.length", None, "in `data.type`"),
    Row("data.input_ids", None, "tokens are random"),
    Row("data.seq_len model.seq_len", "seq_len"),
    Row("data.batch_size", "batch_size"),
    Row("data.micro_batch_size", set_rows, "samples of full length"),
    Row("data.num_workers", None, HARDWARE),
    Row("data.{subsets splits}", None, "in `data.name`"),
    Row("data.probabilities", only(None, instead="`[[source]]` has `repeat`, how often an epoch holds each.")),
    Row("data.stopping_strategy", only("all_exhausted", instead="an epoch holds all. `[[source]]` has `repeat`.")),
    Row("data.shuffle", only(True, instead="conversations come in a new order in each epoch. Remove it.")),
    Row("data.seed", "seed"),
    Row("data.pack_function", None, "samples are packed into rows"),
    Row("data.loss_mask", set_roles),
    Row("data.source[].{dataset name}", "source[].data", since=prime_rl.AUTUMN),
    Row("data.source", "source", since=prime_rl.AUTUMN),
    Row("val.interval", "validation_interval"),
    Row("val.eval_on_start", None, "measured before the first step, and after the last"),
    Row("val.data.name", "validation"),
    Row("val.data.splits", lambda splits, table: {"validation_split": splits[0]}),
    Row("val.data", None, "as in training"),
    Row("loss_impl", None, prime_rl.NO_MATTER),
    Row("weight_broadcast", None, "the engine of an evaluation reads what the trainer has written"),
    Row("dist_timeout_seconds", None, "ranks wait for each other as long as torch does"),
    Row("tokenizer.chat_template", "chat_template"),
    Row("deployment.num_train_gpus", on_gpus("num_ranks")),
    Row("deployment.{num_infer_gpus num_eval_gpus}", None, ENGINE),
    *prime_rl.of_evaluation("eval"),
    refused("eval.client", ENGINES),
    Row("eval.env_server_base_port", None, "workers of environments need no ports"),
    *prime_rl.of_renderer("renderer", "chat_template_kwargs"),
)  # fmt: skip


_OF_RL = ("data", "loss", "dist_timeout_seconds", "max_concurrent_runs")
_OF_BOTH = {"ckpt", "resume", "run", "clean", "dry_run", "bench", "log", "monitors", "prime_monitor", "wandb", "slurm"}
_OF_BOTH |= {"deployment", "tokenizer"}
PRIME_RL_SFT = spread(
    DATA,
    (row for row in prime_rl.TRAINER if not row.theirs.startswith(_OF_RL)),
    (row for row in prime_rl.RUN if row.theirs.partition(".")[0] in _OF_BOTH),
    prime_rl.INFERENCE,
)

PRIME_RL_EVALS = spread(
    Row("eval.source", "env"),
    Row("model", lambda model, table: {"model" if isinstance(model, dict) else "model.name": model}),
    Row("client.base_url", lambda url, table: {"client.base_url": url[0] if isinstance(url, list) and url else url}),
    Row("use_tqdm log weight_broadcast eval.client", None, prime_rl.NO_MATTER),
    Row("save save_to_disk monitors", None, "results are in the run's folder"),
    Row("reasoning_field", None, "thinking is read wherever the server puts it"),
    Row("eval.client.{base_url api_key_var}", "client.{}"),
    Row("eval.concurrency.max_inflight", "max_concurrent"),
    Row("eval.concurrency", None, "`max_concurrent` bounds the rollouts under way"),
    Row("eval.interval env[].interval", None, "`steps` names those to evaluate"),
    Row("env[].skip_first_step", None, "`eval_base` says whether step 0 is evaluated"),
    Row("eval.env_server_base_port", None, "workers of environments need no ports"),
    Row("eval.sampling", "sampling"),
    Row("env[].num_examples", set_count("env[].num_examples", "num_examples")),
    Row("eval.group_size", "rollouts_per_example"),
    Row("eval.num_examples num_examples", set_count("num_examples")),
    refused("online", "`uv run eval --weights-dir FOLDER` evaluates what a run has written. Remove it."),
    *prime_rl.of_sampling("sampling"),
    *prime_rl.of_sources("env", trains=False),
)  # fmt: skip
