"""`trireme login`: there is no account; keys of other services go where their own tools look for them."""

from __future__ import annotations

from argparse import ArgumentParser

WORDS = """\
There is nothing to log in to: everything runs on your own machines, without an account.
What other services ask for goes where their own tools look:

  models on a hub         HF_TOKEN, or `hf auth login`
  Weights & Biases        WANDB_API_KEY, or `wandb login`
  models at an endpoint   configs/endpoints.py or .toml, one entry each; `trireme lab setup` writes one
  judges of environments  OPENAI_API_KEY and the like; `env_file` of a job
  a run on several hosts  TRIREME_TOKEN, or `hosts.token_file`"""


def login(argv: list[str]) -> int:
    ArgumentParser(prog="trireme login", description="Says where keys of other services go.").parse_args(argv)
    print(WORDS)
    return 0
