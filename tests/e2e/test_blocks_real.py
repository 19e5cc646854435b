"""Prompts shorter than the blocks that vLLM would take on a CPU are shared, and answered as if each were read alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from real_run import DEADLINE_S, REPOSITORY

pytestmark = pytest.mark.slow

MODEL = str(REPOSITORY / "models" / "reverse-text-tiny")
LENGTHS = [15, 17, 20, 33, 40]

ASK = """
import json, os, sys
from trireme.config.run import RunConfig
from trireme.inference.server import environment, server_arguments

config = RunConfig.model_validate({"device": "cpu", "inference": {"server": {"port": 1}}})
os.environ.update(environment(config) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
words = server_arguments(config)
block_size = int(words[words.index("--block-size") + 1])
from vllm import LLM, SamplingParams

model, prompts = json.loads(sys.argv[1])
llm = LLM(model, dtype="float32", block_size=block_size, enforce_eager=True, max_model_len=128, max_num_seqs=64)
asked = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(3)]
sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True, logprobs=0)
found = []
for request in llm.generate(asked, sampling, use_tqdm=False):
    (answer,) = request.outputs
    ids = list(answer.token_ids)
    logprobs = [place[token].logprob for place, token in zip(answer.logprobs, ids)]
    cached = request.num_cached_tokens
    found.append({"prompt": request.prompt_token_ids, "cached": cached, "ids": ids, "logprobs": logprobs})
print("FOUND", json.dumps([block_size, found]))
"""


def test_a_group_shares_the_whole_blocks_of_its_prompt_and_has_the_logprobs_of_the_model() -> None:
    prompts = [[(7 * length + place) % 90 + 5 for place in range(length)] for length in LENGTHS]
    words = [sys.executable, "-c", ASK, json.dumps([MODEL, prompts])]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    size, found = json.loads(done.stdout.rpartition("FOUND")[2])
    assert size == (32 if torch.cpu._is_amx_tile_supported() else 16)
    shared = [(length - 1) // size * size for length in LENGTHS]
    cached = [[answer["cached"] for answer in found[start::3]] for start in range(3)]
    assert cached == [[0] * len(LENGTHS), shared, shared]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for answer in found:
        ids = torch.tensor([answer["prompt"] + answer["ids"]])
        with torch.no_grad():
            logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        expected = logprobs[len(answer["prompt"]) - 1 :]
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), expected, rtol=0, atol=1e-4)
