"""The arguments of a `generate()` call, made ready for a loop of our own.

transformers hands such a loop neither the tokenizer nor the assistant model. So `for_drafts`
replaces the arguments that need them: for `attach`, for the Hub's `generate()`, and for each of
many prompts. `predictions_of` reads what the loop then gets as `prediction=`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from selfspec.compat.generation import runs_in_step
from selfspec.draft.sources.prediction import Prediction
from selfspec.errors import UnsupportedError
from selfspec.plugin.refusals import Arguments, refuse

_IDS_OR_TEXT = "prediction must be token ids or text, one for all rows or a list of one for each"


def for_drafts(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which stock's `generate()` calls the loop; refuses what can't be served.

    There `assistant_model` is named `draft_model`, a prediction is token ids, and `stop_strings`
    have become a stopping criterion, unless the caller gave one. Without a tokenizer they stay, so
    that stock raises its own error.
    """
    asked = Arguments(model, arguments)
    refuse(asked)
    if (other := arguments.get("assistant_tokenizer")) is not None:
        raise UnsupportedError(
            "assistant_tokenizer= must be left out, since a draft model has the tokenizer of the "
            f"model (got a {type(other).__name__}); or call generate() without assistant="
        )
    ready = dict(arguments)
    if (draft_model := ready.pop("assistant_model", None)) is not None:
        ready["draft_model"] = draft_model
    tokenizer = ready.pop("tokenizer", None)
    if tokenizer is None:
        return ready
    prediction: Any = ready.get("prediction")
    if _is_text(prediction):
        texts = [prediction] if isinstance(prediction, str) else list(prediction)
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]  # An answer begins with none.
        ready["prediction"] = ids[0] if isinstance(prediction, str) else ids
    if strings := asked.setting("stop_strings"):
        ready["stop_strings"] = None  # As a keyword it overrides all configs.
        given = list(ready.get("stopping_criteria") or ())
        if not any(type(each) is StopStringCriteria for each in given):
            given.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        ready["stopping_criteria"] = StoppingCriteriaList(given)
    return ready


def loop_of(loop: Any, model: Any, arguments: Mapping[str, Any], **ours: Any) -> Any:
    """A loop of ours with the arguments that transformers hands to no loop, and with `ours`."""
    is_synced = runs_in_step(model, arguments.get("synced_gpus"))
    return partial(loop, streamer=arguments.get("streamer"), synced_gpus=is_synced, **ours)


def predictions_of(
    given: Any, num_rows: int, num_return_sequences: int, num_ids: int
) -> list[Prediction | None]:
    """What each row of a batch may draft from; None where its prediction is empty.

    The sequences that are returned for one prompt share its prediction. The model can read
    `num_ids` ids.
    """
    if _is_text(given):
        raise UnsupportedError(
            "prediction as text needs tokenizer= in the same call, and assistant= on an attached "
            f"model (got {given!r:.40}); add what is missing, or pass token ids"
        )
    rows = _rows_of(given)
    num_prompts = num_rows // num_return_sequences
    if len(rows) not in (1, num_prompts):
        raise UnsupportedError(
            f"prediction must be one for all prompts or one for each of the {num_prompts} "
            f"(got {len(rows)})"
        )
    predictions = [_prediction(row, num_ids) for row in rows]
    if len(rows) == 1:
        return predictions * num_rows
    return [each for each in predictions for _ in range(num_return_sequences)]


def _is_text(given: Any) -> bool:
    texts = given if isinstance(given, (list, tuple)) else [given]
    return bool(texts) and all(isinstance(each, str) for each in texts)


def _rows_of(given: Any) -> list[Sequence[int]]:
    """A row is a list; ids that are in no rows are the only one."""
    plain = _plain(given)
    if not isinstance(plain, list):
        raise UnsupportedError(f"{_IDS_OR_TEXT} (got {given!r:.40})")
    rows = [_plain(each) for each in plain]
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
