"""The draft model of a call: whether it can draft for the model at hand, and how it is asked."""

from __future__ import annotations

from transformers import PreTrainedModel

from selfspec.errors import ConfigError, UnsupportedError, VocabularyError
from selfspec.forward.model import num_readable, vocab_size
from selfspec.machine.model_names import file_here
from selfspec.neural.small_model import DraftModel
from selfspec.runner import ModelRunners
from selfspec.weights import Packing

# Vocabularies whose sizes differ by less are taken for one vocabulary with other padding.
_PADDING = 1024
# Tokenizers that differ in special tokens alone differ in less than this share of their tokens.
_FEW = 0.01


def check_draft_model(model: PreTrainedModel) -> None:
    config = getattr(model, "config", None)
    if getattr(config, "target_layer_ids", None) is not None:
        raise ConfigError(
            "draft_model must read a text by itself (got the DFlash drafter "
            f"{type(model).__name__}, which reads the hidden states of another model); leave it "
            "out, or call generate() without selfspec"
        )
    if isinstance(model, type) or config is None or not callable(getattr(model, "generate", None)):
        raise ConfigError(
            f"draft_model must be a causal language model of transformers (got {model!r:.80})"
        )
    if config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise ConfigError(
            "draft_model must be a decoder that predicts the next token (got "
            f"{type(model).__name__}); load a small model with AutoModelForCausalLM"
        )


def new_draft_model(
    draft: PreTrainedModel, target: PreTrainedModel, num_tokens: int, models: ModelRunners
) -> DraftModel:
    """How a draft model is asked in one call; a pair of models is checked when it is new.

    Refuses a prompt without tokens, of which it could read nothing.
    """
    check_draft_model(draft)
    if num_tokens == 0:
        raise UnsupportedError(
            "a draft model must be given the prompt as token ids, which it reads itself (got "
            "inputs_embeds alone); pass input_ids, or leave the draft model out"
        )
    config, fitting = models.config, models.run(target).draft_models
    if draft not in fitting:
        _check_pair(draft, target, models)
        fitting.add(draft)
    packing = Packing.of(draft) if config.may_pack else None
    return DraftModel(draft, num_ids=num_readable(target), top_k=config.top_k, packing=packing)


def _check_pair(draft: PreTrainedModel, target: PreTrainedModel, models: ModelRunners) -> None:
    if draft is target:
        raise UnsupportedError(
            f"draft_model must be another model than the one that it drafts for (got the same "
            f"{type(draft).__name__} twice): its forward costs as much as the step that it saves; "
            "pass a smaller one, or a SelfSpec without a draft model"
        )
    _check_vocabularies(draft, target)
    # Hooks on it change guesses, which are verified anyway.
    ability = models.run(draft).ability(trusts_hooks=True)
    if ability.attention is None:
        reason = str(ability.reason).partition(";")[0]
        raise UnsupportedError(
            f"draft_model must be able to read trees (got {type(draft).__name__}: {reason})"
        )


def _check_vocabularies(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Compares the tokens of both tokenizers if they are on this machine, else the sizes."""
    draft_size, target_size = vocab_size(draft), vocab_size(target)
    tokens, others = (_tokens_by_id(model.config.name_or_path) for model in (draft, target))
    if tokens is None or others is None:
        if abs(draft_size - target_size) >= _PADDING:
            raise VocabularyError(
                f"draft_model must have the tokenizer of the model (got a vocabulary of "
                f"{draft_size} tokens for one of {target_size}); pass a model of the same family"
            )
        return
    shared = tokens.keys() & others.keys()
    differing = [token_id for token_id in shared if tokens[token_id] != others[token_id]]
    if len(differing) > _FEW * len(shared):
        example = min(differing)
        raise VocabularyError(
            f"draft_model must have the tokenizer of the model (got {len(differing)} tokens that "
            f"differ, such as {tokens[example]!r} for {others[example]!r}, id {example}); pass a "
            "model of the same family"
        )


def _tokens_by_id(name: str) -> dict[int, str] | None:
    """The tokens of a model's tokenizer, if its file is on this machine; asks no network."""
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(file_here(name, "tokenizer.json"))).get_vocab()
    except Exception:  # tokenizers has no narrower one, also for a file that is not there.
        return None
    return {number: token for token, number in vocabulary.items()}
