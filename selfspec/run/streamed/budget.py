"""How much of a model is resident within a budget, and which of its layers are streamed.

Knows sizes in bytes; nothing of tensors or files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from selfspec.errors import ConfigError

__all__ = [
    "NUM_BUFFERS",
    "Sizes",
    "choose_streamed",
    "draft_model_bytes",
    "forward_bytes",
    "kv_bytes",
    "text_bytes",
]

# While a layer is computed in one buffer, the next one is read into the other.
NUM_BUFFERS = 2


class Sizes(NamedTuple):
    """What the parts of a model take in memory, in bytes: all that a budget counts.

    That is the resident weights, the buffers of the streamed ones, and for a text of `max_length`
    tokens its KV and the widest forward over it, which reads it as a prompt. A tree's
    forward and its logits fit where the prompt's was. A draft model that is named counts too. Not
    counted are Python and torch themselves, and tables of some ten megabytes.
    """

    fixed: int  # whatever happens: weights outside of the layers, and room for the text
    layers: Sequence[int]  # each of them, resident
    buffers: Sequence[int]  # a buffer for each of them
    scratch: int  # in which weights are converted

    @property
    def whole(self) -> int:
        """Everything resident."""
        return self.fixed + sum(self.layers)

    def beside(self, num_bytes: int) -> Sizes:
        """The same with this many bytes taken by something else."""
        return self._replace(fixed=self.fixed + num_bytes)

    def with_streamed(self, streamed: Collection[int]) -> int:
        """What the model takes with these layers streamed."""
        if not streamed:
            return self.whole
        buffer = NUM_BUFFERS * max(self.buffers[index] for index in streamed)
        resident = sum(size for i, size in enumerate(self.layers) if i not in streamed)
        return self.fixed + resident + buffer + self.scratch


def choose_streamed(sizes: Sizes, may_stream: Sequence[int], max_bytes: int) -> tuple[int, ...]:
    """The layers to stream: as few as the budget allows, spread evenly over those that may be."""
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


def text_bytes(config: Any, num_tokens: int, itemsize: int, num_texts: int = 1) -> int:
    """What texts of `num_tokens` tokens each take: their KV, and the forward that reads one."""
    sizes = (config, num_tokens, itemsize)
    return num_texts * kv_bytes(*sizes) + forward_bytes(*sizes)


def draft_model_bytes(model: Any, num_tokens: int, num_texts: int = 1) -> int:
    """What a draft model takes beside: weights, the KV of its texts, and one text's forward.

    On a CPU its layers may be packed, which takes its weights once more at most.
    """
    weights: int = sum(each.numel() * each.dtype.itemsize for each in model.parameters())
    copies = weights if model.device.type == "cpu" else 0
    config = model.config.get_text_config(decoder=True)
    return weights + copies + text_bytes(config, num_tokens, model.dtype.itemsize, num_texts)


def kv_bytes(config: Any, num_tokens: int, itemsize: int) -> int:
    """What the keys and values of `num_tokens` tokens take, without windows taken into account."""
    query_heads = getattr(config, "num_attention_heads", None)
    if not query_heads:  # A recurrent model keeps no keys.
        return 0
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    width = 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // query_heads)
    if getattr(config, "kv_lora_rank", None):  # Latent attention keeps one narrow state.
        width = config.kv_lora_rank + config.qk_rope_head_dim
    return int(num_tokens * config.num_hidden_layers * width * itemsize)


def forward_bytes(config: Any, num_tokens: int, itemsize: int) -> int:
    """What a forward over `num_tokens` tokens holds at most beside weights and KV, roughly.

    In a decoder layer, each token's hidden state is there about ten times (as it came, normed, as
    queries before and after their rotation, …), and its wider state within the MLP four times, for
    each expert that it goes to. Measured on Llama's layers of sizes 2,048 and 3,584: 28,000 to
    35,000 elements a token, with what the allocator can't give back.
    """
    hidden = config.hidden_size
    sizes = (getattr(config, f"{kind}intermediate_size", None) for kind in ("moe_", ""))
    wide = next((size for size in sizes if isinstance(size, int)), 4 * hidden)
    num_experts = getattr(config, "num_experts_per_tok", None) or 1
    return int(num_tokens * (10 * hidden + 4 * wide * num_experts) * itemsize)


def _spread(items: Sequence[int], number: int) -> tuple[int, ...]:
    """This many of the items, evenly, the last one among them.

    >>> _spread(range(10), 4)
    (2, 4, 7, 9)
    """
    return tuple(items[-(-(i + 1) * len(items) // number) - 1] for i in range(number))


def _rounded_up(num_bytes: int) -> str:
    """An amount that is enough, as a user may name it.

    >>> _rounded_up(12_000_001), _rounded_up(9_999)
    ('13MB', '10KB')
    """
    unit, size = ("MB", 10**6) if num_bytes >= 10**7 else ("KB", 10**3)
    return f"{-(-num_bytes // size)}{unit}"
