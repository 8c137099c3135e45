"""The arguments of a `generate()` call, made ready for a loop of our own.

transformers hands such a loop neither the tokenizer nor the assistant model. So `for_drafts` takes
out the arguments that are for the loop alone, for each of the doors: `attach`, the Hub's
`generate()`, and each of many prompts. `predictions_of` reads what came as `prediction=`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from selfspec.compat.generation import runs_in_step
from selfspec.draft.sources.prediction import Prediction
from selfspec.errors import UnsupportedError
from selfspec.plugin.refusals import Arguments, Outcome, reason_for
from selfspec.row import Streamer

_IDS_OR_TEXT = "prediction must be token ids or text, one for all rows or a list of one for each"


class LoopArguments(NamedTuple):
    """The arguments of a call that transformers hands to no loop."""

    streamer: Streamer | None
    synced_gpus: bool
    draft_model: PreTrainedModel | None
    prediction: Any  # Token ids of one text for all prompts, or a list with those of one for each.
    max_nodes: int | None  # Limits the trees of this call; 1: no drafts.


def for_drafts(
    model: PreTrainedModel, arguments: Mapping[str, Any]
) -> tuple[LoopArguments, dict[str, Any]]:
    """What the loop of a call gets, and what stock's `generate()` does.

    Refuses what can't be served. A prediction has become token ids, and `stop_strings` a stopping
    criterion, unless the caller gave one. Without a tokenizer they stay, so that stock raises its
    own error.
    """
    call = Arguments(model, arguments)
    if reason := reason_for(Outcome.REFUSED, call):
        raise UnsupportedError(reason)
    if (other := arguments.get("assistant_tokenizer")) is not None:
        raise UnsupportedError(
            "assistant_tokenizer= must be left out, since a draft model has the tokenizer of the "
            f"model (got a {type(other).__name__}); or call generate() without assistant="
        )
    ready = dict(arguments)
    draft_model, tokenizer = ready.pop("assistant_model", None), ready.pop("tokenizer", None)
    prediction, max_nodes = ready.pop("prediction", None), ready.pop("max_nodes", None)
    if tokenizer is not None:
        prediction = _as_ids(prediction, tokenizer)
        if strings := call.setting("stop_strings"):
            ready["stop_strings"] = None  # As a keyword it overrides all configs.
            criteria = list(ready.get("stopping_criteria") or ())
            if not any(type(criterion) is StopStringCriteria for criterion in criteria):
                criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
            ready["stopping_criteria"] = StoppingCriteriaList(criteria)
    is_synced = runs_in_step(model, arguments.get("synced_gpus"))
    for_loop = LoopArguments(
        arguments.get("streamer"), is_synced, draft_model, prediction, max_nodes
    )
    return for_loop, ready


def _as_ids(prediction: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Texts as token ids; an answer begins with no special token."""
    if not _is_text(prediction):
        return prediction
    texts = [prediction] if isinstance(prediction, str) else list(prediction)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids[0] if isinstance(prediction, str) else ids


def predictions_of(
    prediction: Any, num_rows: int, num_return_sequences: int, num_ids: int
) -> list[Prediction | None]:
    """What each row of a batch may draft from; None where its prediction is empty.

    The sequences that are returned for one prompt share its prediction. The model can read
    `num_ids` ids.
    """
    if _is_text(prediction):
        raise UnsupportedError(
            "prediction as text needs tokenizer= in the same call, and assistant= on an attached "
            f"model (got {prediction!r:.40}); add what is missing, or pass token ids"
        )
    rows = _rows_of(prediction)
    num_prompts = num_rows // num_return_sequences
    if len(rows) not in (1, num_prompts):
        raise UnsupportedError(
            f"prediction must be one for all prompts or one for each of the {num_prompts} "
            f"(got {len(rows)})"
        )
    predictions = [_prediction(row, num_ids) for row in rows]
    if len(rows) == 1:
        return predictions * num_rows
    return [row for row in predictions for _ in range(num_return_sequences)]


def _is_text(prediction: Any) -> bool:
    texts = prediction if isinstance(prediction, (list, tuple)) else [prediction]
    return bool(texts) and all(isinstance(text, str) for text in texts)


def _rows_of(prediction: Any) -> list[Sequence[int]]:
    """A row is a list; ids that are in no rows are the only one."""
    plain = _plain(prediction)
    if not isinstance(plain, list):
        raise UnsupportedError(f"{_IDS_OR_TEXT} (got {prediction!r:.40})")
    rows = [_plain(row) for row in plain]
    return rows if rows and isinstance(rows[0], list) else [rows]


def _plain(value: Any) -> Any:
    """A tensor, an array or a tuple as a list; anything else as it is."""
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _prediction(row: Any, num_ids: int) -> Prediction | None:
    if not isinstance(row, list):
        raise UnsupportedError(f"{_IDS_OR_TEXT} (got {row!r:.40} among rows of ids)")
    for token in row:
        if isinstance(token, bool) or not isinstance(token, int):
            raise UnsupportedError(f"{_IDS_OR_TEXT} (got {token!r:.40} among the ids)")
        if not 0 <= token < num_ids:
            raise UnsupportedError(
                f"prediction must hold ids of the model's {num_ids} tokens (got {token}); "
                "encode it with the model's tokenizer"
            )
    return Prediction(row) if row else None
