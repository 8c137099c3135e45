"""Caches on disk and on the Hub: folders of safetensors and JSON, tied to a tokenizer.

A folder is written whole or not at all, and one that is not what was written is refused by name.
This package knows no model: `SelfSpec` puts what is loaded into its sources.
"""

from selfspec.store.card import Card, read_card
from selfspec.store.contents import Arrays, CacheContents, TokenizerInfo, tokenizer_info
from selfspec.store.hub import locate, push_cache
from selfspec.store.loading import check_tokenizer, load_cache
from selfspec.store.saving import check_target, save_cache
from selfspec.store.tables import KEY_OF, check_values
from selfspec.store.verifying import CacheReport, FileReport, verify_cache

__all__ = [
    "KEY_OF",
    "Arrays",
    "CacheContents",
    "CacheReport",
    "Card",
    "FileReport",
    "TokenizerInfo",
    "check_target",
    "check_tokenizer",
    "check_values",
    "load_cache",
    "locate",
    "push_cache",
    "read_card",
    "save_cache",
    "tokenizer_info",
    "verify_cache",
]
