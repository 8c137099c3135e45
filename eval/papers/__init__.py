"""Papers, a file each, in their own words and symbols.

A method is made of the same parts as a user's: a `Source` names what may come, a `Budget`
says how a step spends its width, a `Shape` which tree is drafted, and a `Scheduler` which prompts
are next. ``as_in("diaa")`` is a paper's own method; `SelfSpec()` is the best of all:

======================================  ==================  ========================================
what                                    paper               in `SelfSpec()`
======================================  ==================  ========================================
tables of the likeliest next tokens     DIAA                kept; whole rows are replaced, a second
                                                            table knows two tokens
tree grown anew in every step           DIAA                kept; with chances that are counted
decays, threshold, update interval      DIAA                thrown out: with counted chances they
                                                            bring nothing
tables and KV updated meanwhile         DIAA                thrown out: it cost tokens, and saved no
                                                            time
phrases of a corpus                     Self-Draft          thrown out for whole texts
n-grams of this text                    Self-Draft          thrown out for suffix matches, which
                                                            bring 1.68 tokens a step for 1.33
branches in the tree                    Self-Draft          thrown out: nodes of the tree bring as
                                                            much for the same queries
weights read ahead of the forward       EdgeLLM             kept, in `selfspec.load`
small model that stays in memory        EdgeLLM             kept, with `draft_model`
branch pacer, self-adaptive threshold   EdgeLLM             thrown out for what a step costs here
drafts while the large model is read    EdgeLLM             thrown out: they hit too seldom
width by measured cost                  Ghidorah            kept, learned from the steps themselves
tree fitted beforehand                  Ghidorah            thrown out: trees that grow bring more
attention in two parts, two units       Ghidorah            thrown out: one masked call is faster
prompts sorted by their lengths         edge networks       kept, as `ShortestFirst`
batches and lengths by equations        edge networks       thrown out: they need two machines
======================================  ==================  ========================================

The last paper, "Efficient LLM Inference over Heterogeneous Edge Networks with Speculative
Decoding", is about two base stations, which ``python -m eval edge_network`` simulates.

`docs/papers.md` has the figures of every line.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

import selfspec
from selfspec.config import SpecConfig
from selfspec.errors import check_names

if TYPE_CHECKING:
    from selfspec import SelfSpec

__all__ = ["PAPERS", "as_in", "method_of"]

# The papers that have a method of their own for `generate()`.
PAPERS = ("diaa", "self-draft", "edgellm", "ghidorah")


def as_in(paper: str, **options: Any) -> SelfSpec:
    """The method of one paper, for comparisons; `SelfSpec()` is the best of all.

    Args:
        paper: "diaa", "self-draft", "edgellm" or "ghidorah".
        options: The paper's own, as its file names them; knobs, and what `SelfSpec` takes besides,
            such as `contents` for DIAA's warm-up. EdgeLLM needs `draft_model`, and Ghidorah `tree`,
            a file of ``python -m eval fit``.
    """
    from selfspec.plugin.parts import check_draft_model

    if (draft_model := options.get("draft_model")) is not None:
        check_draft_model(draft_model)
    known = {*signature(_module_of(paper).method).parameters} - {"options"}
    known |= {field.name for field in fields(SpecConfig)}
    known |= {*signature(selfspec.SelfSpec).parameters} - {"config", "knobs"}
    check_names(f"option of as_in({paper!r})", options, known)
    return selfspec.SelfSpec(**method_of(paper, **options))


def method_of(paper: str, **options: Any) -> dict[str, Any]:
    """The arguments of `SelfSpec` that make a paper's method; `options` are its own and others."""
    arguments: dict[str, Any] = _module_of(paper).method(**options)
    return arguments


def _module_of(paper: str) -> Any:
    check_names("paper", [paper], PAPERS)
    return import_module(f"{__name__}.{paper.replace('-', '_')}")
