"""Caches: one safetensors file each, on disk or on the Hub, tied to a tokenizer.

This room knows no model. It puts what a file holds into what a `SelfSpec` knows, and back.
"""

from selfspec.cache.contents import (
    KEY_OF,
    Arrays,
    CacheContents,
    TokenizerInfo,
    tokenizer_info,
)
from selfspec.cache.file import SUFFIX, check_target, file_of, save_cache
from selfspec.cache.hub import load_cache, locate, push_cache
from selfspec.cache.remember import Remembered, put_over

__all__ = [
    "KEY_OF",
    "SUFFIX",
    "Arrays",
    "CacheContents",
    "Remembered",
    "TokenizerInfo",
    "check_target",
    "file_of",
    "load_cache",
    "locate",
    "push_cache",
    "put_over",
    "save_cache",
    "tokenizer_info",
]
