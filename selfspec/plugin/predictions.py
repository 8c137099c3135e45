"""`prediction=`: what an answer will probably look like, as text or as token ids."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.draft.sources.prediction import Prediction
from selfspec.errors import UnsupportedError


def as_ids(prediction: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
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
    if prediction is None:
        return [None] * num_rows
    if _is_text(prediction):
        raise UnsupportedError(
            "prediction as text needs tokenizer= in the same call, and assistant= on an attached "
            f"model (got {prediction!r:.40}); add what is missing, or pass token ids"
        )
    texts = _texts_of(prediction)
    num_prompts = num_rows // num_return_sequences
    if len(texts) not in (1, num_prompts):
        raise UnsupportedError(
            f"prediction must be one for all prompts or one for each of the {num_prompts} "
            f"(got {len(texts)})"
        )
    predictions = [_prediction(ids, num_ids) for ids in texts]
    if len(texts) == 1:
        return predictions * num_rows
    return [shared for shared in predictions for _ in range(num_return_sequences)]


def _is_text(prediction: Any) -> bool:
    texts = prediction if isinstance(prediction, (list, tuple)) else [prediction]
    return bool(texts) and all(isinstance(text, str) for text in texts)


def _texts_of(prediction: Any) -> list[Any]:
    """The ids of each text; ids that are in no lists are those of the only one."""
    values = _plain(prediction)
    if not isinstance(values, list):
        return [values]
    texts = [_plain(value) for value in values]
    return texts if texts and isinstance(texts[0], list) else [texts]


def _plain(value: Any) -> Any:
    """A tensor, an array or a tuple as a list; anything else as it is."""
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _prediction(ids: Any, num_ids: int) -> Prediction | None:
    is_list = isinstance(ids, list)
    wrong = [token for token in ids if not _is_id(token, num_ids)] if is_list else [ids]
    if wrong:
        raise UnsupportedError(
            "prediction must be text or token ids, one for all rows or a list of one for each, "
            f"and ids must be among the {num_ids} that the model reads (got {wrong[0]!r:.40}); "
            "encode it with the model's tokenizer"
        )
    return Prediction(ids) if ids else None


def _is_id(token: Any, num_ids: int) -> bool:
    return type(token) is int and 0 <= token < num_ids
