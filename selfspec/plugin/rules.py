"""What a `generate()` call asks for: what is refused, what is decoded plainly, what looks at
one row alone.

Reads transformers' objects; runs nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache
from transformers.generation import logits_process, stopping_criteria

from selfspec.compat.generation import (
    KV_NAMES,
    hidden_kv_name,
    keeps_only_states,
    kv_of,
)
from selfspec.compat.modules import is_parallel, prompt_learning
from selfspec.run.rope import rope_reason
from selfspec.verify.choosers import Processing
from selfspec.verify.shortlist import Warpers
from selfspec.verify.transcript import RowStops

# Processors whose scores for a row depend on that row alone. Others, user-made ones among them,
# may look at the batch or count their calls: for them the rows of a batch move together.
_ROW_PROCESSORS = frozenset(
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
    if hasattr(logits_process, name)
)


# Those that may end a list of processors, in this order, by the argument that each has.
_KNOWN_WARPERS = (
    ("temperature", logits_process.TemperatureLogitsWarper),
    ("top_k", logits_process.TopKLogitsWarper),
    ("top_p", logits_process.TopPLogitsWarper),
    ("min_p", logits_process.MinPLogitsWarper),
)

# Model arguments that a tree's forward sets or follows; any other would have to be followed too.
_FOLLOWED_KWARGS = frozenset(
    (
        "attention_mask",
        "inputs_embeds",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        *KV_NAMES,
        "return_dict",
        "use_cache",
    )
)

_REFUSED_MODES = {
    "num_beams": "beam search can't be drafted for; set num_beams=1 or leave assistant= out",
    "penalty_alpha": (
        "contrastive search can't be drafted for; set penalty_alpha=None or leave assistant= out"
    ),
    "dola_layers": "DoLa can't be drafted for; set dola_layers=None or leave assistant= out",
    "constraints": "constrained beam search can't be drafted for; leave assistant= out",
    "force_words_ids": "constrained beam search can't be drafted for; leave assistant= out",
    "prompt_lookup_num_tokens": (
        "prompt lookup is another assistant; set prompt_lookup_num_tokens=None "
        "or leave assistant= out"
    ),
    "assistant_early_exit": (
        "early exit is another assistant; set assistant_early_exit=None or leave assistant= out"
    ),
    "use_mtp": "multi-token prediction is another assistant; set use_mtp=False",
}


def unservable(model: Any, setting: Callable[[str], Any]) -> str | None:
    """The rule that a call breaks which drafting will never serve, with the fix; else None.

    `setting(name)` is what the generation config of the call says.
    """
    if model.config.is_encoder_decoder:
        return (
            f"{type(model).__name__} is an encoder-decoder model, and drafts are made for decoders "
            "alone; call generate() without assistant="
        )
    for name, message in _REFUSED_MODES.items():
        value = setting(name)
        if value and not (name == "num_beams" and value == 1):
            return f"{message} (got {name}={value!r})"
    return None


def plain_reason(
    model: Any, generation_config: Any, model_kwargs: Mapping[str, Any], reach: int
) -> str | None:
    """Why this call, whatever the attention, has to be decoded plainly; None where it need not.

    `reach`: how many tokens beyond the prompt the deepest draft may stand.
    """
    if is_parallel(model):
        return "it is spread over several processes, each of which would choose a width of its own"
    if prompt_learning(model):
        return "prompt learning puts tokens into the KV cache that generate() does not count"
    if reason := rope_reason(model.config, reach, model_kwargs):
        return reason
    if not model_kwargs.get("use_cache", True):
        return "use_cache=False leaves no KV cache to verify a draft with"
    cache = kv_of(model_kwargs)
    if cache is None and (name := hidden_kv_name(model_kwargs)):
        return (
            f"transformers {transformers.__version__} hands over the KV cache as {name!r}, a name "
            "that this version of selfspec does not know"
        )
    if cache is None or keeps_only_states(cache):
        return (
            f"{type(model).__name__} keeps a state of its own in place of a KV cache, as recurrent "
            "models do, and a draft can't be taken back from it"
        )
    if type(cache) is not DynamicCache or cache.offloading:
        offloaded = "offloaded " if getattr(cache, "offloading", False) else ""
        return f"a KV cache of type {offloaded}{type(cache).__name__} can't take a draft back"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name):
                return f"{name}=True asks for the tensors of each plain step"
    for name, value in model_kwargs.items():
        if name not in _FOLLOWED_KWARGS and value is not None and value != {}:
            return f"the model argument {name!r} can't be followed along a draft"
    return None


def end_ids(generation_config: Any) -> list[int]:
    """The tokens that end a text; none if nothing but its length does."""
    ends = generation_config.eos_token_id
    if ends is None:
        return []
    return [int(each) for each in torch.as_tensor(ends, device="cpu").flatten()]


def for_rows(processors: Any, num_rows: int) -> list[Any]:
    """The processors of each row of a batch: the same ones, but for what holds a value a row."""
    return [
        type(processors)(_for_row(processor, row) for processor in processors)
        for row in range(num_rows)
    ]


def _for_row(processor: Any, row: int) -> Any:
    # Stock gives the repetition penalty the padding of all rows, as a tensor. A number stands for
    # one row and says the same, however many prefixes of that row are processed at once.
    padding = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(padding, torch.Tensor):
        return processor
    if len(padding) == 1 and type(processor) not in _ROW_PROCESSORS:
        return processor  # A copy could count calls that its owner looks for.
    twin = copy.copy(processor)
    twin.prompt_ignore_length = int(padding[row])
    return twin


def split_warpers(processors: Any) -> Processing:
    """A row's processors, and those at their end that a shortlist can stand for."""
    arguments: dict[str, Any] = {}
    num_first = len(processors)
    for name, kind in reversed(_KNOWN_WARPERS):
        last = processors[num_first - 1] if num_first else None
        if type(last) is kind and _rules_all_out(last):
            arguments[name] = getattr(last, name)
            num_first -= 1
    if not arguments:
        return Processing(processors)
    first, last = (type(processors)(p) for p in (processors[:num_first], processors[num_first:]))
    return Processing(first or None, last, Warpers(**arguments))


def _rules_all_out(warper: Any) -> bool:
    """Does a warper keep no more than it says, and give no score to what it rules out?"""
    keeps = getattr(warper, "min_tokens_to_keep", 1)
    return keeps == 1 and getattr(warper, "filter_value", -math.inf) == -math.inf


def looks_at_rows(processors: Sequence[Any]) -> bool:
    """Do all processors treat each row by itself, without state?"""
    return all(type(p) in _ROW_PROCESSORS or getattr(p, "looks_at_rows", False) for p in processors)


def row_stops(criteria: Any) -> RowStops | None:
    """The stopping rules where all of them look at one row alone; else None."""
    eos_ids: frozenset[int] = frozenset()
    others = []
    for criterion in criteria:
        if type(criterion) is stopping_criteria.EosTokenCriteria:
            eos_ids |= frozenset(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is stopping_criteria.StopStringCriteria:
            others.append(criterion)
        elif type(criterion) is not stopping_criteria.MaxLengthCriteria:
            return None
    max_length = length_limit(criteria)
    if max_length is None or (others and not eos_ids):
        return None  # without an end token, stock lets a row that stopped go on writing
    return RowStops(max_length, eos_ids, others)


def length_limit(criteria: Any) -> int | None:
    """How long a text may get, prompt included: the least that a criterion says, if any does.

    A criterion of the caller's takes the place of the one that `generate()` makes of its config.
    """
    lengths = [c.max_length for c in criteria if type(c) is stopping_criteria.MaxLengthCriteria]
    return min(lengths, default=None)
