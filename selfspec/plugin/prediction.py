"""The argument `prediction=` of `generate()`: from text or ids to one `Prediction` for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec.draft.sources.prediction import Prediction
from selfspec.errors import UnsupportedError

_RULE = "prediction must be token ids or text, one for all rows or a list with one for each row"


def encoded_prediction(given: Any, tokenizer: Any) -> Any:
    """The ids of a prediction that is text; anything else as it is.

    No special tokens are added, since an answer begins with none.
    """
    if not _is_text(given):
        return given
    texts = [given] if isinstance(given, str) else list(given)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids[0] if isinstance(given, str) else ids


def predictions_of(
    given: Any, num_rows: int, num_return_sequences: int, model_config: Any
) -> list[Prediction | None]:
    """What each row of a batch may draft from; None where its prediction is empty or not given.

    The sequences that are returned for one prompt share its prediction.
    """
    if given is None:
        return [None] * num_rows
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
    vocab_size = model_config.get_text_config(decoder=True).vocab_size
    predictions = [_prediction(row, vocab_size) for row in rows]
    if len(rows) == 1:
        return predictions * num_rows
    return [each for each in predictions for _ in range(num_return_sequences)]


def _is_text(given: Any) -> bool:
    if isinstance(given, (list, tuple)):
        return bool(given) and all(isinstance(each, str) for each in given)
    return isinstance(given, str)


def _rows_of(given: Any) -> list[Sequence[int]]:
    """The ids as a list of rows; ids that are not in rows are the only one."""
    plain = _plain(given)
    if not isinstance(plain, list):
        raise UnsupportedError(f"{_RULE} (got {given!r:.40})")
    rows = [_plain(each) for each in plain]
    return rows if rows and isinstance(rows[0], list) else [rows]


def _plain(value: Any) -> Any:
    """A tensor, an array or a tuple as a list; anything else as it is."""
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _prediction(row: Any, vocab_size: int) -> Prediction | None:
    if not isinstance(row, list):
        raise UnsupportedError(f"{_RULE} (got {row!r:.40} among rows of ids)")
    for token in row:
        if isinstance(token, bool) or not isinstance(token, int):
            raise UnsupportedError(f"{_RULE} (got {token!r:.40} among the ids)")
        if not 0 <= token < vocab_size:
            raise UnsupportedError(
                f"prediction must hold ids of the model's {vocab_size} tokens (got {token}); "
                "encode it with the model's tokenizer"
            )
    return Prediction(row) if row else None
