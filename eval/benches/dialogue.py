"""From a question and the answers so far to the ids that a model is given.

Knows tokenizers; neither models nor how an answer comes about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.benches.questions import Question
from eval.errors import EvalError
from selfspec.errors import unknown_name

PROMPT_FORMATS = ("auto", "chat", "plain")


class Prompter:
    """Puts questions as a tokenizer's chat template does, or as plain text to go on with."""

    def __init__(self, tokenizer: Any, prompt_format: str = "auto") -> None:
        self.tokenizer = tokenizer
        self.format = _format(tokenizer, prompt_format)

    def prompt_ids(self, question: Question, answers: Sequence[str]) -> list[int]:
        """The prompt of the turn after those answers."""
        turns = question.turns[: len(answers) + 1]
        if self.format == "plain":
            first = turns[0] if question.plain is None else question.plain
            pairs = zip(answers, turns[1:], strict=True)
            text = first + "".join(f"{answer}\n\n{turn}\n" for answer, turn in pairs)
            return list(self.tokenizer(text)["input_ids"])
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": turn},
            ]
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        """An answer as it is fed back."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def _format(tokenizer: Any, asked: str) -> str:
    if asked not in PROMPT_FORMATS:
        raise EvalError(unknown_name("prompt format", asked, PROMPT_FORMATS))
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if asked == "chat" and not has_template:
        raise EvalError(
            "--prompt-format chat needs a model with a chat template (this one has none); name "
            "another with --model, or pass --prompt-format plain"
        )
    if asked == "auto":
        return "chat" if has_template else "plain"
    return asked
