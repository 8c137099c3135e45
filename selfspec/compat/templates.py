"""Which names chat templates use. transformers finds them, and keeps the function to itself."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_template_utils import _get_template_variables


def template_variables(owner: Any) -> frozenset[str]:
    """The variables in the chat template of a tokenizer or processor. With several, in all.

    Only these may be passed on from a client: a processor takes any other name as an argument of
    its own `apply_chat_template`, and would fetch what `images` names.
    """
    templates = owner.chat_template
    several = templates.values() if isinstance(templates, dict) else [templates]
    return frozenset.intersection(*map(_get_template_variables, several))
