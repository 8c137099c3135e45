"""Plans memory: which layers of a model stay in it, and which are streamed, within a budget.

Knows sizes in bytes; nothing of tensors or files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from selfspec.errors import ConfigError

# While one layer is computed from its buffer, the next layer is read into the other buffer.
NUM_BUFFERS = 2
# With the model's rounded copy a step brought 5.8 tokens, with tables alone 1.85. To read the model
# in memory for one look took as long as to read a sixth of it from disk meanwhile. (A billion
# weights in bfloat16 within 1,440 MB, two cold answers of 24 tokens, one copy in 8 bits.)
_TOKENS_WITH_COPY, _TOKENS, _MEMORY_SPEED = 5.8, 1.85, 6


class Sizes(NamedTuple):
    """What the parts of a model take in memory, in bytes: all that a budget counts.

    Python, torch, the learned tables (about ten megabytes) and the noise of sampled texts do not
    count. That noise is nine numbers for each token of the vocabulary.
    """

    fixed: int  # the weights outside of the layers, the texts, and a draft model
    layers: Sequence[int]  # where they are resident
    buffers: Sequence[int]  # a buffer for one layer at a time
    scratch: int  # the buffer in which weights are converted
    # What stands for a layer in the model's rounded copy if it is streamed, and what stands for the
    # head if none is.
    rounded: Sequence[int] = ()
    rounded_head: int = 0

    @property
    def whole(self) -> int:
        return self.fixed + sum(self.layers) + sum(self.rounded) + self.rounded_head

    def with_streamed(self, streamed: Collection[int]) -> int:
        """Bytes of the model with these layers streamed."""
        if not streamed:
            return self.whole
        buffer = NUM_BUFFERS * max(self.buffers[index] for index in streamed)
        resident = sum(size for i, size in enumerate(self.layers) if i not in streamed)
        rounded = sum(size for i, size in enumerate(self.rounded) if i in streamed)
        return self.fixed + resident + rounded + buffer + self.scratch


def choose_streamed(sizes: Sizes, may_stream: Sequence[int], max_bytes: int) -> tuple[int, ...]:
    """The layers to stream: as few as the budget allows, spread evenly over `may_stream`."""
    if sizes.whole <= max_bytes:
        return ()
    for number in range(NUM_BUFFERS + 1, len(may_stream) + 1):
        streamed = _spread(may_stream, number)
        if sizes.with_streamed(streamed) <= max_bytes:
            return streamed
    least = min(sizes.whole, sizes.with_streamed(may_stream))
    raise ConfigError(
        f"max_memory must be at least {_rounded_up(least)} for this model (got {max_bytes} bytes); "
        "name that, or make room with a shorter max_length or fewer texts at a time"
    )


def copy_pays(sizes: Sizes, may_stream: Sequence[int], max_bytes: int) -> bool:
    """Is less read for a token with the model's rounded copy than with more resident layers?

    The copy reads the weights in memory once for each token.
    """
    alone = sizes._replace(rounded=(), rounded_head=0)
    beside, streamed = (choose_streamed(s, may_stream, max_bytes) for s in (sizes, alone))
    if not beside:  # All of it fits.
        return True
    in_memory = sum(sizes.layers) / _MEMORY_SPEED
    with_copy, without = (
        in_memory + sum(sizes.layers[index] for index in layers) for layers in (beside, streamed)
    )
    return with_copy / _TOKENS_WITH_COPY + in_memory < without / _TOKENS


def text_bytes(model: PreTrainedModel, num_tokens: int, num_texts: int = 1) -> int:
    """What texts take: their KV, and the forward that reads one of them as a prompt.

    A forward over a tree takes less.
    """
    return num_texts * kv_bytes(model, num_tokens) + forward_bytes(model, num_tokens)


def draft_model_bytes(model: PreTrainedModel, num_tokens: int, num_texts: int = 1) -> int:
    """Bytes of a draft model: its weights, the KV of its texts, and a forward over one text."""
    weights: int = sum(x.numel() * x.dtype.itemsize for x in model.parameters())
    return weights + text_bytes(model, num_tokens, num_texts)


def kv_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    """What the keys and values of `num_tokens` tokens take, as if all layers kept all of them.

    A window, or a layer that keeps a state, takes less. The model needs no weights yet.
    """
    config = model.config.get_text_config(decoder=True)
    query_heads = getattr(config, "num_attention_heads", None)
    if not query_heads:  # A recurrent model keeps no keys.
        return 0
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    width = 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // query_heads)
    if getattr(config, "kv_lora_rank", None):  # Latent attention keeps one narrow state.
        width = config.kv_lora_rank + config.qk_rope_head_dim
    return int(num_tokens * config.num_hidden_layers * width * model.dtype.itemsize)


def forward_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    """Roughly what a forward over `num_tokens` tokens holds at most, without weights and KV.

    In a decoder layer this is, for a token, about ten vectors of the hidden size (the input, the
    normed input, queries before and after their rotation, …) and four of the MLP's size for every
    expert of the token. A Llama with a hidden size of 2,048 and an MLP of 3,584 took 28,000 to
    35,000 elements a token, with the memory that the allocator can't give back.
    """
    config = model.config.get_text_config(decoder=True)
    hidden = config.hidden_size
    sizes = (getattr(config, f"{which}intermediate_size", None) for which in ("moe_", ""))
    wide = next((size for size in sizes if isinstance(size, int)), 4 * hidden)
    num_experts = getattr(config, "num_experts_per_tok", None) or 1
    return int(num_tokens * (10 * hidden + 4 * wide * num_experts) * model.dtype.itemsize)


def _spread(items: Sequence[int], number: int) -> tuple[int, ...]:
    """`number` of the items, spread evenly; the last item is always one of them.

    >>> _spread(range(10), 4)
    (2, 4, 7, 9)
    """
    return tuple(items[-(-(i + 1) * len(items) // number) - 1] for i in range(number))


def _rounded_up(num_bytes: int) -> str:
    """A number of bytes as a user writes it, rounded up.

    >>> _rounded_up(12_000_001), _rounded_up(9_999)
    ('13MB', '10KB')
    """
    unit, size = ("MB", 10**6) if num_bytes >= 10**7 else ("KB", 10**3)
    return f"{-(-num_bytes // size)}{unit}"
