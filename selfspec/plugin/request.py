"""From a `generate()` call to the `Request` that the engine decodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial

import torch

from selfspec.compat.grammars import grammars_of
from selfspec.draft.sources import Source
from selfspec.draft.sources.grammar import Grammar, GrammarSource, TokenBytes
from selfspec.forward.prompt import PromptReader
from selfspec.plugin.call import Call
from selfspec.plugin.row_rules import end_ids, for_rows, row_stops, split_warpers
from selfspec.request import NewRow, Request
from selfspec.row import Row, Stops
from selfspec.verify.choosers import BatchChooser, Chooser, GreedyChooser, ProcessedChooser
from selfspec.verify.tape import NoiseTape


def request_of(
    call: Call,
    *,
    index: int = 0,  # Names its first row in records.
    generator: torch.Generator | None = None,  # Draws the tokens; None: the one that stock uses.
    fails_alone: bool = False,
    scope: Hashable = None,  # With learning="request", prompts of one scope share their KV.
) -> Request:
    """What the engine is asked for, once it is known that the call can be drafted for."""
    learns = call.config.learning != "frozen"
    arguments = (call.model, call.input_ids, call.model_kwargs, call.generation_config)
    return Request(
        reader=PromptReader(*arguments, learns=learns, hears=call.hears),
        new_rows=_new_rows(call, index, generator, fails_alone),
        sources=_sources(call),
        encoder_texts=_encoder_texts(call),
        streamer=call.streamer,
        max_new_columns=call.max_new_columns,
        max_tree=call.config.max_nodes,
        fails_alone=fails_alone,
        stats=call.stats,
        scope=(scope or object()) if call.config.learning == "request" else None,
    )


def _sources(call: Call) -> list[list[Source]]:
    """For each row: its prediction, the grammar that its processors follow, and a draft model."""
    grammars = cache(partial(grammars_of, call.logits_processor, len(call.input_ids), TokenBytes))
    found: list[list[Source]] = []
    for number, prediction in enumerate(call.predictions):
        grammar = GrammarSource(partial(_of_row, grammars, number))
        own = (prediction, grammar, call.draft_model)
        found.append([each for each in own if each is not None])
    return found


def _of_row(grammars: Callable[[], list[Grammar | None]], number: int) -> Grammar | None:
    return grammars()[number]


def _new_rows(
    call: Call, index: int, generator: torch.Generator | None, fails_alone: bool
) -> list[NewRow]:
    ends, pad = end_ids(call.generation_config), call.generation_config.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0  # As transformers chooses it.
    choosers, stops = _choosers(call, generator)
    return [
        partial(
            Row,
            index=index + number,
            prompt=call.input_ids[number : number + 1],
            chooser=chooser,
            max_length=call.max_length,
            max_nodes=call.max_nodes,
            stops=stops,
            pad_token_id=pad,
            # Stock's own test for filling up rows that stopped.
            gets_pads=any(hasattr(each, "eos_token_id") for each in call.stopping_criteria),
            fails_alone=fails_alone,
            stats=call.stats,
        )
        for number, chooser in enumerate(choosers)
    ]


def _choosers(call: Call, generator: torch.Generator | None) -> tuple[list[Chooser], Stops]:
    """Rows walk their trees alone unless something asks for them to move together."""
    stops, config = row_stops(call.stopping_criteria), call.generation_config
    num_rows, samples = len(call.input_ids), bool(config.do_sample)
    if stops is None or call.route.together:
        kept = (config.output_scores, config.output_logits)
        keeps_scores, keeps_logits = (bool(config.return_dict_in_generate and x) for x in kept)
        rules = (call.logits_processor, call.stopping_criteria, samples)
        together = BatchChooser(call.input_ids.long(), *rules, keeps_scores, keeps_logits)
        return [together] * num_rows, Stops()
    if not call.logits_processor and not samples:
        return [GreedyChooser() for _ in range(num_rows)], stops
    tape = NoiseTape(num_rows, generator) if samples else None
    processings = map(split_warpers, for_rows(call.logits_processor, num_rows))
    return [ProcessedChooser(each, tape, row) for row, each in enumerate(processings)], stops


def _encoder_texts(call: Call) -> list[list[int]]:
    """What an encoder has read for each row, which an answer may repeat."""
    ids, num_rows = call.inputs_tensor, len(call.input_ids)
    is_text = ids is not None and ids.dim() == 2 and not ids.is_floating_point()
    if ids is None or not (is_text and call.model.config.is_encoder_decoder):
        return [[]] * num_rows
    ids = ids.repeat_interleave(num_rows // len(ids), dim=0)
    mask = call.model_kwargs.get("attention_mask")
    seen = torch.ones_like(ids) if mask is None else mask
    seen = seen.bool() & (ids >= 0)  # transformers has -100 for outputs that are handed in.
    return [row[each].tolist() for row, each in zip(ids, seen, strict=True)]
