"""`Answer`: what came of one of many prompts."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.stats import GenerationStats

__all__ = ["Answer"]


@dataclass(frozen=True)
class Answer:
    """What the model wrote behind one prompt.

    Attributes:
        index: Which prompt it is, counted from 0 in the order in which they were given.
        text: The new text, without special tokens.
        ids: The new tokens, the end-of-text token among them.
        finish_reason: ``"stop"`` if the model or a stop string ended the text, ``"length"`` if it
            was cut off at the most tokens.
        num_prompt_tokens: How many tokens the prompt has.
        stats: What was counted for this prompt. Of the time of a step, each row has an equal share.
    """

    index: int
    text: str
    ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    stats: GenerationStats
