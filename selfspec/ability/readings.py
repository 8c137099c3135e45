"""Plain forwards over a few tokens, which say what a trial of a model must come to.

An output (…, D) of a token is its logits, or what the last layer gives that a trial runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from selfspec.ability.trial_layers import TrialLayers
from selfspec.compat.generation import KV, kv_of
from selfspec.compat.states import states_by_place
from selfspec.forward.inputs import plain_inputs
from selfspec.forward.model import device_of, takes

_NUM_COLUMNS = 4  # Of what an encoder has read in a trial; a decoder takes any number.


class TrialText(NamedTuple):
    """A text with its positions, and the indices of the tokens whose output is compared.

    Where it is read in two forwards, the first one reads `num_prompt` tokens.
    """

    ids: Sequence[int]
    positions: Sequence[int]
    compared: Sequence[int]
    num_prompt: int


def read_at_once(
    model: PreTrainedModel, texts: Sequence[TrialText], layers: TrialLayers
) -> list[torch.Tensor]:
    """The outputs (N, D) of the texts' compared tokens, in one forward without a KV cache.

    Shorter texts are padded on the right, where no compared token sees it.
    """
    length = max(len(text.ids) for text in texts)
    rows = [(*text.ids, *[text.ids[-1]] * (length - len(text.ids))) for text in texts]
    input_ids = torch.tensor(rows, device=device_of(model))
    # A mask of ones keeps transformers from taking odd positions for several texts in one row.
    arguments = {"attention_mask": torch.ones_like(input_ids), "use_cache": False}
    if takes(model, "position_ids"):
        arguments["position_ids"] = torch.tensor(
            [(*text.positions, *range(length))[:length] for text in texts], device=device_of(model)
        )
    prepared = plain_inputs(model, input_ids, arguments, length)
    # A model's code may drop the positions; without them it would count columns.
    inputs = arguments | {name: value for name, value in prepared.items() if value is not None}
    inputs.pop("logits_to_keep", None)
    outputs = layers.output(lambda: model(**inputs).logits)
    return [row[list(text.compared)].float() for row, text in zip(outputs, texts, strict=True)]


def read_in_two(model: PreTrainedModel, text: TrialText, layers: TrialLayers) -> torch.Tensor:
    """The output (N, D) of a text's compared tokens, in a forward after that of its prompt."""
    start = text.num_prompt
    cache = prefilled(model, text.ids[:start], layers)
    output = read_on(model, text.ids[start:], start, cache, layers)[0]
    return output[[index - start for index in text.compared]].float()


def read_by_steps(model: PreTrainedModel, text: TrialText, layers: TrialLayers) -> torch.Tensor:
    """The output (N, D) of a text's compared tokens, by plain steps after its prompt."""
    start = text.num_prompt
    cache = prefilled(model, text.ids[:start], layers)
    steps = [
        read_on(model, [token], place, cache, layers)[0]
        for place, token in enumerate(text.ids[start:], start)
    ]
    return torch.cat(steps)[[place - start for place in text.compared]].float()


def read_without_states(
    model: PreTrainedModel,
    ids: Sequence[int],
    num_last: int,
    names: Sequence[str],
    layers: TrialLayers,
) -> torch.Tensor:
    """The output (N, D) of the last tokens, in a forward that begins without some states."""
    start = len(ids) - num_last
    cache = prefilled(model, ids[:start], layers)
    for (_, name, _), state in states_by_place(cache.layers).items():
        if name in names:
            state.zero_()
    return read_on(model, ids[start:], start, cache, layers)[0].float()


def prefilled(
    model: PreTrainedModel, prompt: Sequence[int], layers: TrialLayers, num_rows: int = 1
) -> DynamicCache:
    """A KV cache that holds the prompt, for the layers that are run."""
    cache = new_cache(model, layers)
    read_on(model, prompt, 0, cache, layers, num_rows)
    return cache


def new_cache(model: PreTrainedModel, layers: TrialLayers) -> DynamicCache:
    """An empty KV cache for the layers that are run."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    layers.cut(cache)
    return cache


def read_on(
    model: PreTrainedModel,
    ids: Sequence[int],
    start: int,
    cache: DynamicCache,
    layers: TrialLayers,
    num_rows: int = 1,
) -> torch.Tensor:
    """The output (B, Q, D) of equal rows that follow the `start` tokens in the cache."""
    input_ids = torch.tensor([list(ids)] * num_rows, device=device_of(model))
    arguments = arguments_at(model, cache, range(start, start + len(ids)), num_rows)
    inputs = plain_inputs(model, input_ids, arguments, len(ids))
    inputs.pop("logits_to_keep", None)  # Bamba would give the last ones alone.
    return layers.output(lambda: model(**inputs).logits)


def arguments_at(
    model: PreTrainedModel, cache: DynamicCache, positions: Sequence[int], num_rows: int = 1
) -> dict[str, Any]:
    """The arguments that `generate()` would make inputs of, for some equal rows."""
    arguments: dict[str, Any] = {KV: cache, "use_cache": True}
    if takes(model, "position_ids"):
        arguments["position_ids"] = torch.tensor([positions] * num_rows, device=device_of(model))
    return arguments


class _Read(BaseModelOutput):  # type: ignore[misc]
    """What an encoder has read. Some decoders look for the encoder's mask in it."""

    attention_mask = None


class Decoder:
    """The decoder of a model, whose encoder has read some noise; everything else is the model's.

    The encoder itself is never run, since it may take as long as many steps.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,  # of the text; a trial hides none of it
        **inputs: Any,
    ) -> Any:
        """One forward, with the inputs of any decoder or with those that the model prepares."""
        inputs = {"decoder_input_ids": input_ids, **inputs}
        if (kv := kv_of(inputs)) is not None:
            inputs[KV] = EncoderDecoderCache(kv, DynamicCache())
        return self._model(**inputs, encoder_outputs=self._noise(len(inputs["decoder_input_ids"])))

    def _noise(self, num_rows: int) -> _Read:
        encoder = self._model.get_encoder()
        width = getattr(encoder, "config", self._model.config).get_text_config().hidden_size
        seeded = torch.Generator("cpu").manual_seed(0)
        noise = torch.randn(
            (1, _NUM_COLUMNS, width), generator=seeded, dtype=torch.float32, device="cpu"
        )
        noise = noise.to(device_of(self._model), self._model.dtype)
        return _Read(last_hidden_state=noise.expand(num_rows, -1, -1))
