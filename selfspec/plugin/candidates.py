"""Parts for transformers' own loops: a candidate generator and a logits processor.

`SelfSpecCandidateGenerator` drafts a chain for transformers' assisted decoding. `LutRecorder` fills
the LUTs during any plain call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import LogitsProcessor

from selfspec.compat.generation import decode_assisted
from selfspec.draft.drafter import Drafter
from selfspec.draft.sources import RowStart
from selfspec.errors import UnsupportedError
from selfspec.forward.model import num_readable
from selfspec.learning import top_k_of
from selfspec.plugin.attach import check_assistant
from selfspec.plugin.loop import loop_for
from selfspec.plugin.spec import SelfSpec
from selfspec.prompt import Call
from selfspec.records import DraftTree, StepRecord

_MAX_NODES = 16  # of a chain, the last committed token among them


class SelfSpecCandidateGenerator(CandidateGenerator):  # type: ignore[misc]
    """Drafts chains for transformers' assisted decoding, which takes one row.

    transformers has no argument for a candidate generator, so `generate` calls it::

        SelfSpecCandidateGenerator(spec).generate(model, **inputs)

    The `SelfSpec`'s draft model drafts too, or the one that the call names with `assistant_model=`.
    """

    def __init__(self, spec: SelfSpec, prompt: Call | None = None) -> None:
        check_assistant(spec)
        self._spec = spec
        self._prompt = prompt
        self._drafter: Drafter | None = None  # There is none before the prompt was read.
        self._tree = DraftTree.of_root(0)

    def generate(self, model: PreTrainedModel, **arguments: Any) -> Any:
        """As `model.generate()`, by assisted decoding; takes the same arguments, by name."""
        loop, ready = loop_for(self._spec, model, arguments)
        # With this, transformers checks the call and prepares it as one of assisted decoding.
        ready["prompt_lookup_num_tokens"] = _MAX_NODES
        return model.generate(custom_generate=replace(loop, on_call=self._decode), **ready)

    def _decode(self, prompt: Call) -> Any:
        if not prompt.input_ids.shape[1]:
            raise UnsupportedError(
                "inputs_embeds must come with their input_ids, since the assisted decoding of "
                "transformers 5.17 writes another text without them (got none); or use "
                "generate(..., assistant=spec) of an attached model"
            )
        # A criterion of the caller's may name less than the config does.
        longest = prompt.generation_config.max_length
        if prompt.max_length > longest:
            raise UnsupportedError(
                f"MaxLengthCriteria must name at most the {longest} tokens of max_length or "
                f"max_new_tokens, since the assisted decoding of transformers would never end "
                f"(got {prompt.max_length}); raise max_new_tokens, or leave the criterion out"
            )
        return decode_assisted(
            prompt.model,
            SelfSpecCandidateGenerator(self._spec, prompt),  # With the state of this call alone.
            prompt.input_ids,
            logits_processor=prompt.logits_processor,
            stopping_criteria=prompt.stopping_criteria,
            generation_config=prompt.generation_config,
            inputs_tensor=prompt.inputs_tensor,
            streamer=prompt.streamer,
            synced_gpus=prompt.synced_gpus,
            **prompt.model_kwargs,
        )

    def get_candidates(
        self, input_ids: torch.Tensor, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`input_ids` (1, L) followed by the chain; without logits it is checked greedily."""
        drafter, prompt = self._drafter, self._prompt
        if drafter is None or prompt is None:
            return input_ids, None
        max_depth = max(prompt.max_length - input_ids.shape[1] - 1, 0)
        drafter.prepare()
        max_nodes = min(prompt.max_nodes, _MAX_NODES)
        self._tree = drafter.draft(int(input_ids[0, -1]), max_nodes, max_depth)
        drafted = input_ids.new_tensor([self._tree.tokens[1:]])
        return torch.cat([input_ids, drafted], dim=-1), None

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Learns from the scores (1, drafts + 1, V) of a step, which `input_ids` ends with."""
        is_first = self._drafter is None
        drafter = self._drafter = self._drafter or self._opened(input_ids, scores.shape[-1])
        learned = drafter.learned
        if learned.learns:
            top = top_k_of(scores[0, : num_matches + 1], learned.top_k)
            learned.observe_pairs(_last_pairs(input_ids[:, :-1], num_matches + 1), top)
        if is_first:
            return
        committed = input_ids[0, -num_matches - 1 :].tolist()
        path = list(range(len(committed)))  # The last token is the model's.
        record = StepRecord(row=0, tree=self._tree, path=path, committed_ids=committed)
        drafter.observe(record)
        if learned.learns:
            learned.calibration.observe(record)

    def _opened(self, input_ids: torch.Tensor, vocab_size: int) -> Drafter:
        spec, prompt, ids = self._spec, self._prompt, input_ids[0].tolist()
        assert prompt is not None
        learned = spec.learned(vocab_size).for_request(spec.config.learning)
        start = RowStart(prompt_ids=ids, max_new_tokens=prompt.max_length - len(ids))
        sources = [] if prompt.draft_model is None else [prompt.draft_model]
        config, readable = spec.config.changed(top_k=1), num_readable(prompt.model)
        return Drafter(learned, start, config, sources, num_readable=readable)


class LutRecorder(LogitsProcessor):  # type: ignore[misc]
    """Fills a `SelfSpec`'s LUTs from the scores of a plain call, and changes none of them.

    It records under ``learning="session"`` alone, in any plain `generate()`, with one row or many.
    It sees the scores as the processors before it in the list leave them::

        model.generate(**inputs, logits_processor=[LutRecorder(spec)])
    """

    is_row_wise = True  # With our own loop, rows may then advance by different numbers of tokens.

    def __init__(self, spec: SelfSpec) -> None:
        check_assistant(spec)
        self._spec = spec

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        if self._spec.config.learning == "session" and input_ids.shape[1]:
            learned = self._spec.learned(scores.shape[-1])
            learned.observe_pairs(_last_pairs(input_ids, 1), top_k_of(scores, learned.top_k))
        return scores


def _last_pairs(input_ids: torch.Tensor, length: int) -> NDArray[np.int64]:
    """(B * length, 2): the last two tokens at each of the last columns; -1 means none."""
    # A prompt that came as embeddings has no ids, so none come before its first new token.
    ids = np.pad(input_ids.cpu().numpy(), [(0, 0), (2, 0)], constant_values=-1)
    return np.stack([ids[:, -length - 1 : -1], ids[:, -length:]], axis=-1).reshape(-1, 2)
