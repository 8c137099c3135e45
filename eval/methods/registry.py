"""Who takes part in a measurement, by name.

`METHODS` is the registry: whoever has another contestant puts its maker there.
"""

from __future__ import annotations

from typing import Any

from eval.methods.method import (
    AssistedMethod,
    Float32Method,
    Maker,
    Method,
    MethodError,
    MtpMethod,
    PaddedMethod,
    Resources,
    SelfSpecMethod,
    StaticMethod,
)
from eval.methods.names import FORWARD_ONLY, OURS, STOCK
from eval.methods.openvino import OpenVinoMethod
from eval.methods.published import PUBLISHED
from selfspec import SelfSpec
from selfspec.errors import unknown_name

LOOKUP_TOKENS = 10  # Prompt lookup's authors and the documentation of transformers use this.


def new_method(name: str, resources: Resources | None = None) -> Method:
    """The method of that name; an unknown one is answered with the nearest."""
    if name not in METHODS:
        raise MethodError(unknown_name("method", name, METHODS))
    return METHODS[name](resources or Resources())


def _forward_only(resources: Resources) -> Method:
    """With no drafts and nothing to learn: what selfspec's way to run a forward gains."""
    knobs: dict[str, Any] = {"max_nodes": 1, "sources": ()}
    return SelfSpecMethod(FORWARD_ONLY, SelfSpec(resources.config.changed(**knobs)))


METHODS: dict[str, Maker] = {
    STOCK: lambda _: Method(STOCK),
    "stock-float32": lambda _: Float32Method("stock-float32"),
    "stock-padded": lambda _: PaddedMethod("stock-padded"),
    "stock-static": lambda _: StaticMethod("stock-static", {"cache_implementation": "static"}),
    "prompt-lookup": lambda _: Method("prompt-lookup", {"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
    "assisted": lambda given: AssistedMethod("assisted", given.assistant),
    "mtp": lambda _: MtpMethod("mtp", {"use_mtp": True}),
    "openvino": lambda given: OpenVinoMethod("openvino", given.openvino),
    FORWARD_ONLY: _forward_only,
    OURS: lambda given: SelfSpecMethod(OURS, given.new_spec(given.config)),
    **PUBLISHED,
}
