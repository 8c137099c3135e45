"""The sizes that a small Llama is grown to, named after the models that have them.

A named shape is stated in its model's own head size; `GrownShape.fitted` turns it into heads of
the source's size, which leaves parameters and KV bytes as they are.

    shape  after          hidden layers heads kv head  inner   parameters, no embeddings
    135m   SmolLM-135M       576     30     8  4   64   1536     106,203,456 (+0.0 %)
    0.5b   Qwen2.5-0.5B      896     24    16  4   64   4864     368,880,512 (+3.1 %)
    1b     Llama-3.2-1B     2048     16    32  8   64   8192     973,146,112 (+0.0 %)
    3b     Llama-3.2-3B     3072     28    24  8  128   8192   2,818,747,392 (+0.0 %)
    7b     Llama-2-7B       4096     32    32 32  128  11008   6,476,271,616 (+0.0 %)

The vocabulary is the source's own.

SmolLM's 9 heads over 3 groups and Qwen's 14 over 2 became 8 and 16 over 4, since a source of four
key-value heads needs four groups. KV bytes a token follow: 4/3 of SmolLM's and twice Qwen's.

A real model may be deeper than the shape, or have heads that the shape can't hold: SmolLM2-135M has
30 layers, and 9 heads over 3 groups. Then the source's layers and heads are kept, and the inner
width becomes smaller, so that the parameters stay as many.
"""

from dataclasses import dataclass, replace
from math import ceil

from transformers import LlamaConfig

from eval.errors import EvalError
from selfspec.errors import unknown_name

_INNER_MULTIPLE = 64  # Matrix products are slow at inner widths that are no multiple of this.


class GrowError(EvalError):
    """The source model, the shape or an option doesn't allow growing."""


@dataclass(frozen=True, kw_only=True)
class GrownShape:
    """The sizes of a Llama; its vocabulary is the source's."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int

    def fitted(self, source: LlamaConfig) -> "GrownShape":
        """This shape in heads of the source's size, with room for its layers and its heads.

        More layers and other heads are paid for with a smaller inner width.
        """
        shape = self._cut(source.head_dim)
        num_layers = max(shape.num_hidden_layers, source.num_hidden_layers)
        fitted = replace(shape, num_hidden_layers=num_layers)
        if not shape._holds_heads(source):
            heads, kv_heads = source.num_attention_heads, source.num_key_value_heads
            fitted = replace(fitted, num_attention_heads=heads, num_key_value_heads=kv_heads)
        return fitted if fitted == shape else fitted._with_parameters_of(shape)

    def num_copies(self, source: LlamaConfig) -> int:
        """How many key-value heads of this shape each of the source's takes.

        It takes more than one where the source has more query heads to a key-value head.
        """
        old_group = source.num_attention_heads // source.num_key_value_heads
        new_group = self.num_attention_heads // self.num_key_value_heads
        return ceil(old_group / new_group)

    def _cut(self, head_dim: int) -> "GrownShape":
        """The same attention width and KV width in heads of another size."""
        kv_width = self.num_key_value_heads * self.head_dim
        if kv_width % head_dim:
            raise GrowError(
                f"num_key_value_heads * head_dim must be a multiple of the source's head_dim "
                f"(got {kv_width} and {head_dim}); name another shape"
            )
        return replace(
            self,
            num_attention_heads=self.num_attention_heads * self.head_dim // head_dim,
            num_key_value_heads=kv_width // head_dim,
            head_dim=head_dim,
        )

    def _holds_heads(self, source: LlamaConfig) -> bool:
        """Whether the source's heads find room in this shape, in heads of the same size."""
        needed = self.num_copies(source) * source.num_key_value_heads
        enough = self.num_attention_heads >= source.num_attention_heads
        return enough and self.num_key_value_heads >= needed

    def _with_parameters_of(self, other: "GrownShape") -> "GrownShape":
        """The inner width at which the layers have as many weights as the other shape's."""
        of_a_layer = other._attention_width() + 3 * other.intermediate_size
        width = of_a_layer * other.num_hidden_layers / self.num_hidden_layers
        inner = (width - self._attention_width()) / 3
        rounded = max(round(inner / _INNER_MULTIPLE), 1) * _INNER_MULTIPLE
        return replace(self, intermediate_size=rounded)

    def _attention_width(self) -> int:
        """The widths of q, k, v and o together."""
        return 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim


def _shape(
    hidden: int, layers: int, heads: int, kv_heads: int, head: int, inner: int
) -> GrownShape:
    """A row of the table above."""
    return GrownShape(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        intermediate_size=inner,
    )


SHAPES = {
    "135m": _shape(576, 30, 8, 4, 64, 1536),
    "0.5b": _shape(896, 24, 16, 4, 64, 4864),
    "1b": _shape(2048, 16, 32, 8, 64, 8192),
    "3b": _shape(3072, 28, 24, 8, 128, 8192),
    "7b": _shape(4096, 32, 32, 32, 128, 11008),
}


def named_shape(name: str) -> GrownShape:
    """The shape of that name, such as ``0.5b``."""
    if name not in SHAPES:
        raise GrowError(unknown_name("shape", name, SHAPES))
    return SHAPES[name]
