"""Parts for transformers' own loops: a candidate generator and a logits processor.

`SelfSpecCandidateGenerator` drafts a chain for stock's assisted decoding. `LutRecorder` fills the
LUTs during any stock call.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import LogitsProcessor

from selfspec.compat.generation import decode_assisted
from selfspec.draft.drafter import Drafter
from selfspec.draft.learned import Learned
from selfspec.draft.sources import RowStart
from selfspec.errors import UnsupportedError
from selfspec.forward.model import num_readable
from selfspec.learning import last_pairs, top_k_of
from selfspec.plugin.arguments import for_drafts
from selfspec.plugin.loop import Loop
from selfspec.plugin.spec import SelfSpec
from selfspec.prompt import Prompt
from selfspec.records import DraftTree, StepRecord
from selfspec.row import Row

_MAX_NODES = 16  # The tree has at most 16 nodes, and stock gets its best chain.


class SelfSpecCandidateGenerator(CandidateGenerator):  # type: ignore[misc]
    """Drafts the best chain of the tree for stock's assisted decoding, which takes one row.

    Stock has no argument for a candidate generator, so `generate` calls it::

        SelfSpecCandidateGenerator(spec).generate(model, **inputs)

    The `SelfSpec`'s draft model drafts too, or the one that the call names with `assistant_model=`.
    """

    def __init__(self, spec: SelfSpec) -> None:
        self._spec = spec
        self._prompt: Prompt | None = None
        self._row: Row | None = None  # There is none before the prompt was read.
        self._tree = DraftTree.of_root(0)

    def generate(self, model: PreTrainedModel, **arguments: Any) -> Any:
        """What `model.generate()` gives by assisted decoding; takes the same arguments, by name."""
        for_loop, ready = for_drafts(model, arguments)
        # With this, stock checks the call and prepares it as one of assisted decoding.
        ready["prompt_lookup_num_tokens"] = _MAX_NODES
        return model.generate(custom_generate=Loop(self._spec, for_loop, then=self._write), **ready)

    def _write(self, prompt: Prompt) -> Any:
        # A criterion of the caller's may name less than the config does.
        longest = prompt.generation_config.max_length
        if prompt.max_length > longest:
            raise UnsupportedError(
                f"MaxLengthCriteria must name at most the {longest} tokens of max_length or "
                f"max_new_tokens, since the assisted decoding of transformers would never end "
                f"(got {prompt.max_length}); raise max_new_tokens, or leave the criterion out"
            )
        candidates = SelfSpecCandidateGenerator(self._spec)  # With the state of this call alone.
        candidates._prompt = prompt
        return decode_assisted(
            prompt.model,
            candidates,
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
        """`input_ids` (1, L) followed by the chain; no logits, so stock checks it greedily."""
        row = self._row
        if row is None:
            return input_ids, None
        max_nodes = min(self._spec.config.max_nodes, _MAX_NODES)
        row.drafter.prepare()
        self._tree = row.drafter.draft(row.last_token, max_nodes, row.max_depth)
        drafted = input_ids.new_tensor([_best_chain(self._tree)])
        return torch.cat([input_ids, drafted], dim=-1), None

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Learns from the scores (1, drafts + 1, V) of the step; `input_ids` holds its outcome."""
        spec, row = self._spec, self._row
        learned = (
            spec.learned(scores.shape[-1]).for_request(spec.config.learning)
            if row is None
            else row.drafter.learned
        )
        if learned.learns:
            top = top_k_of(scores[0, : num_matches + 1], learned.top_k)
            pairs = last_pairs(input_ids[:, :-1].cpu(), None, num_matches + 1)
            learned.observe_pairs(pairs.numpy(), top)
        if row is None:
            self._row = self._opened(input_ids, learned)
        else:
            self._observe(row, input_ids[0, row.length :].tolist())

    def _opened(self, input_ids: torch.Tensor, learned: Learned) -> Row:
        prompt, ids = self._prompt, input_ids[0].tolist()
        assert prompt is not None
        start = RowStart(prompt_ids=ids, max_new_tokens=prompt.max_length - len(ids))
        sources = [] if prompt.draft_model is None else [prompt.draft_model]
        readable = num_readable(prompt.model)
        drafter = Drafter(learned, start, self._spec.config, sources, num_readable=readable)
        return Row(prompt=input_ids, prompt_ids=ids, max_length=prompt.max_length, drafter=drafter)

    def _observe(self, row: Row, committed: list[int]) -> None:
        path = self._tree.path_of(committed[:-1])  # The last token is the model's.
        record = StepRecord(row=0, tree=self._tree, path=path, committed_ids=committed)
        row.new_ids += committed
        row.drafter.observe(record)
        if row.drafter.learned.learns:
            row.drafter.learned.calibration.observe(record)


class LutRecorder(LogitsProcessor):  # type: ignore[misc]
    """Fills a `SelfSpec`'s LUTs from the scores of a stock call, and changes none of them.

    It records under ``learning="session"`` alone, in any stock `generate()`, with one row or many.
    It sees the scores as the processors before it in the list leave them::

        model.generate(**inputs, logits_processor=[LutRecorder(spec)])
    """

    looks_at_rows = True  # With our own loop, rows may then advance by different numbers of tokens.

    def __init__(self, spec: SelfSpec) -> None:
        self._spec = spec

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        if self._spec.config.learning == "session" and input_ids.shape[1]:
            learned = self._spec.learned(scores.shape[-1])
            pairs = last_pairs(input_ids.cpu(), None, 1)
            learned.observe_pairs(pairs.numpy(), top_k_of(scores, learned.top_k))
        return scores


def _best_chain(tree: DraftTree) -> list[int]:
    """The tokens from the root down, always by the best child, which is the first one added."""
    chain: list[int] = []
    node = 0
    while tree.children[node]:
        token, node = next(iter(tree.children[node].items()))
        chain.append(token)
    return chain
