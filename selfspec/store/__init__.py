"""Caches on disk and on the Hub: folders of safetensors and JSON, tied to a tokenizer.

A folder is written whole or not at all, and one that is not what was written is refused by name.
This package knows no model: `SelfSpec` puts what is loaded into its sources.
"""

from selfspec.store.card import Card, read_card
from selfspec.store.contents import (
    Arrays,
    CacheContents,
    TokenizerInfo,
    is_unnamed,
    tokenizer_info,
    unnamed_tokenizer,
)
from selfspec.store.hub import locate, push_cache
from selfspec.store.loading import check_tokenizer, load_cache
from selfspec.store.memory_folder import MemoryFolder
from selfspec.store.news import news, on_top
from selfspec.store.saving import check_target, save_cache
from selfspec.store.tables import KEY_OF, check_values, flat_keys
from selfspec.store.verifying import verify_cache

__all__ = [
    "KEY_OF",
    "Arrays",
    "CacheContents",
    "Card",
    "MemoryFolder",
    "TokenizerInfo",
    "check_target",
    "check_tokenizer",
    "check_values",
    "flat_keys",
    "is_unnamed",
    "load_cache",
    "locate",
    "news",
    "on_top",
    "push_cache",
    "read_card",
    "save_cache",
    "tokenizer_info",
    "unnamed_tokenizer",
    "verify_cache",
]
