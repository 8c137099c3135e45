"""vLLM's option `--speculative-config`, in our own options.

Of vLLM's methods it may name those that need no heads which were trained for the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from selfspec.cli.options import DraftOptions, Knobs
from selfspec.config import MOST
from selfspec.errors import CliError
from selfspec.serving.fields import RequestError, checked, json_object

_OPTION = "--speculative-config"
_OURS = "; leave the option out, and selfspec drafts from texts, --cache and --draft-model"


class _Given(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    method: Literal["ngram", "suffix", "draft_model"]
    model: str | None = None
    num_speculative_tokens: Annotated[int, Field(gt=0, lt=MOST)] | None = None
    # These change nothing: selfspec takes the longest match, and limits what it keeps itself.
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_min_token_prob: float | None = None


def in_our_options(text: str, asked: DraftOptions, knobs: Knobs) -> tuple[DraftOptions, Knobs]:
    try:
        # The command line has what is no UTF-8 as halves of characters.
        given = checked(_Given, json_object(text.encode(errors="surrogateescape"), "its value"))
    except RequestError as error:
        why = _OURS if error.field == "method" else ""
        raise CliError(f"{_OPTION}: {error}{why}") from None
    if (given.method == "draft_model") != (given.model is not None):
        raise CliError(
            f"{_OPTION}: model must be given for the method 'draft_model', and for no other (got "
            f"{given.model!r} for {given.method!r})"
        )
    # "suffix" drafts from earlier texts too, as our sources do by default.
    found: dict[str, Any] = {"sources": ("context",)} if given.method == "ngram" else {}
    if given.num_speculative_tokens is not None:
        found["max_nodes"] = given.num_speculative_tokens + 1  # with the root of the tree
    both = [name for name in found if getattr(knobs, name) != getattr(Knobs(), name)]
    if given.model is not None and asked.draft_model is not None:
        both.append("draft_model")
    if both:
        other = f"--{both[0].replace('_', '-')}"
        raise CliError(f"{_OPTION} and {other} exclude each other here; leave one out")
    asked = asked if given.model is None else replace(asked, draft_model=given.model)
    return asked, replace(knobs, **found)
