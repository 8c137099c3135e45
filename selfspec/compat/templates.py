"""Which names chat templates use. transformers finds them, and keeps the function to itself."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_template_utils import _get_template_variables


def template_variables(owner: Any) -> frozenset[str]:
    """The variables in the chat template of a tokenizer or processor; of several, those in all.

    A processor takes every other name that `apply_chat_template` gets as an argument of its own. It
    would then fetch what `images` names.
    """
    templates = owner.chat_template
    several = templates.values() if isinstance(templates, dict) else [templates]
    return frozenset.intersection(*map(_get_template_variables, several))
