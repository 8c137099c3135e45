"""What `generate()` returns of a prompt whose texts are complete."""

from __future__ import annotations

from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from selfspec.compat.generation import KV
from selfspec.prompt import Prompt
from selfspec.row import output_of
from selfspec.stats import GenerationStats


class SelfSpecOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    stats: GenerationStats


def result_of(prompt: Prompt) -> Any:
    """What stock's own loop has returned, or the same of rows that were drafted for."""
    if prompt.mode == "plain":
        return prompt.output
    config, rows = prompt.generation_config, prompt.rows
    if not config.return_dict_in_generate:
        return output_of(rows)
    recorded: Any = rows[0].chooser
    has_encoder = prompt.model.config.is_encoder_decoder
    output: Any = (GenerateEncoderDecoderOutput if has_encoder else SelfSpecOutput)(
        sequences=output_of(rows),
        scores=tuple(recorded.scores) if config.output_scores else None,
        logits=tuple(recorded.logits) if config.output_logits else None,
        **{KV: prompt.kv},
    )
    output.stats = prompt.stats
    return output
