"""What a user hands over, checked: the parts of a `SelfSpec`, a draft model, a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.cache import CacheContents
from selfspec.config import ROUNDED, SpecConfig
from selfspec.draft.calibration import Calibration
from selfspec.draft.shape import Shape
from selfspec.draft.sources import Source
from selfspec.draft.sources.following import Prediction
from selfspec.draft.sources.worth import SourceWorth
from selfspec.errors import ConfigError, UnsupportedError, VocabularyError, shown
from selfspec.forward.model import num_readable, vocab_size
from selfspec.neural.copy_source import CopySource
from selfspec.neural.draft_cursor import FULL_GAIN
from selfspec.neural.rounded_copy import rounded_copy
from selfspec.neural.small_model import DraftModel
from selfspec.runner import ModelRunner

# Vocabularies whose sizes differ by less are taken for one vocabulary with other padding.
_PADDING = 1024


def check_parts(
    config: Any, extra_sources: Any, contents: Any, shape: Any, calibration: Any, draft_model: Any
) -> None:
    """Refuses what is no such part, when a `SelfSpec` is made."""
    if not isinstance(config, SpecConfig | None):
        raise ConfigError(
            f"config must be a SpecConfig (got {shown(config)}); knobs go by name, such as "
            "SelfSpec(max_nodes=32), and a model goes to selfspec.attach(model)"
        )
    for part, wanted in ((shape, Shape), (calibration, Calibration)):
        if not isinstance(part, wanted | None):
            name = wanted.__name__
            raise ConfigError(f"{name.lower()} must be a {name} (got {part!r:.80})")
    is_list = isinstance(extra_sources, Iterable)
    for source in extra_sources if is_list else [extra_sources]:
        if not (is_list and isinstance(source, Source)):
            raise ConfigError(
                f"extra_sources must be a list of sources of your own (got {shown(source)}); "
                "sources= names those of selfspec"
            )
    if not isinstance(contents, CacheContents | None):
        raise ConfigError(
            f"contents must be what load_cache() of selfspec.cache returns (got "
            f"{shown(contents)}); SelfSpec.from_pretrained() takes the name of a cache"
        )
    if draft_model is not None and draft_model not in ROUNDED:
        check_draft_model(draft_model)


def check_draft_model(model: PreTrainedModel) -> None:
    config = getattr(model, "config", None)
    if isinstance(model, type) or config is None or not callable(getattr(model, "generate", None)):
        raise ConfigError(
            "draft_model must be a causal language model of transformers, or 'int4' or 'int8' for "
            f"the model itself, rounded (got {shown(model)})"
        )
    if config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise ConfigError(
            "draft_model must be a decoder that predicts the next token (got "
            f"{type(model).__name__}); load a small model with AutoModelForCausalLM"
        )


def new_draft_model(
    draft: PreTrainedModel | str,
    target: PreTrainedModel,
    num_rows: int,
    num_tokens: int,
    runner_of: Callable[[PreTrainedModel], ModelRunner],
) -> Source:
    """How a draft model is asked in one call; a pair of models is checked when it is new.

    Refuses a prompt without tokens, of which it could read nothing.
    """
    if isinstance(draft, str) and draft in ROUNDED:
        return _of_itself(draft, target, num_rows, runner_of(target))
    check_draft_model(draft)
    if num_tokens == 0:
        raise UnsupportedError(
            "a draft model must be given the prompt as token ids, which it reads itself (got "
            "inputs_embeds alone); pass input_ids, or leave the draft model out"
        )
    runner = runner_of(target)
    if draft not in runner.draft_models:
        _check_pair(draft, target, runner_of(draft))
        runner.draft_models[draft] = SourceWorth(FULL_GAIN)
    worth, top_k = runner.draft_models[draft], runner.config.top_k
    return DraftModel(draft, num_ids=num_readable(target), top_k=top_k, worth=worth)


def _of_itself(name: str, model: PreTrainedModel, num_rows: int, runner: ModelRunner) -> CopySource:
    """The model's rounded copy, made where it can draft for the call, or why it can't."""
    support = runner.support()
    if support.attention is None:
        reason: str | None = "no trees are verified, whose slots it needs"
    else:
        several = "several texts share its forwards" if num_rows > 1 else None
        reason = several or support.attention.reading_reason
    return CopySource(reason or rounded_copy(model, name), runner.config.top_k)


def _check_pair(draft: PreTrainedModel, target: PreTrainedModel, runner: ModelRunner) -> None:
    draft_size, target_size = vocab_size(draft), vocab_size(target)
    if abs(draft_size - target_size) >= _PADDING:
        raise VocabularyError(
            f"draft_model must have the tokenizer of the model (got a vocabulary of {draft_size} "
            f"tokens for one of {target_size}); pass a model of the same family"
        )
    # Hooks on it change guesses, which are verified anyway.
    support = runner.support(trusts_hooks=True)
    if support.attention is None:
        reason = str(support.reason).partition(";")[0]
        raise UnsupportedError(
            f"draft_model must be able to read trees (got {type(draft).__name__}: {reason})"
        )


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
            f"prediction must be one text, or one for each prompt (got {len(texts)} for "
            f"{num_prompts})"
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
