"""An encoder-decoder model as a decoder alone, for trials."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from selfspec.compat.generation import KV, kv_of
from selfspec.forward.model import device_of

_NUM_COLUMNS = 4  # The length of the noise; any will do.


class _Read(BaseModelOutput):  # type: ignore[misc]
    """An encoder's output. Some decoders look for the encoder's mask in it."""

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
