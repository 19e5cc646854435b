"""The doctor's question about the tokenizer, which the orchestrator's own reading of it answers."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.base.errors import ConfigError
from trireme.orchestrator.rollout.chat import ChatTokenizer, open_chat_tokenizer
from trireme.tools.doctor.finding import Case, Finding, of, ok, problem, told, warning

TEXT = "Row 12 oars; then rest."
QUESTION = [{"role": "user", "content": TEXT}]


def tokenizer(case: Case) -> Iterator[Finding]:
    """What the engine is asked with; the trainer's where it is another."""
    names = (case.config.inference.model.name, case.config.trainer.tokenizer.name)
    for name in dict.fromkeys(name for name in names if name):
        try:
            yield of(of_tokenizer(open_chat_tokenizer(name)), name)
        except ConfigError as error:
            yield told(str(error))
        except Exception as error:  # of the `tokenizers` library: it raises nothing narrower
            yield problem(
                f"{name}: its tokenizer cannot be read ({error}) - expected tokenizer.json in its fast form",
                "Save it again: `AutoTokenizer.from_pretrained(...).save_pretrained(folder)`.",
            )


def of_tokenizer(opened: ChatTokenizer) -> Finding:
    """A question goes through the chat template and the tokenizer, and comes back."""
    asked = opened.render(QUESTION, tools=None, generate=True)
    ids = opened.encode(asked)
    size = opened.vocab_size
    said = f"{opened.num_tokens:,} tokens; a question of {len(TEXT)} characters becomes {len(ids)} tokens"
    if size is not None and max(ids, default=0) >= size:
        return problem(
            f"{said}, one of which is number {max(ids)} - expected less than {size}, which the model has room for",
            "Take the tokenizer that came with the model.",
        )
    if TEXT not in asked:
        return problem(
            f"{said}, and the chat template leaves the question out - expected it in the prompt",
            "Look at chat_template.jinja in the model's folder.",
        )
    if asked == opened.render(QUESTION, tools=None, generate=False):
        return warning(
            f"{said}; the chat template does not say where the assistant begins (`add_generation_prompt`)",
            "Take a template that does, or the model has to learn it from reward alone.",
        )
    if opened.decode(ids, keep_special=True) != asked:
        return warning(
            f"{said}, which stand for another text - expected the same: some characters are not in its vocabulary",
            "Fine for a tiny model; otherwise take the tokenizer that came with the model.",
        )
    return ok(f"{said} and back")
