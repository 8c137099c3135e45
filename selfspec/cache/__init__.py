"""Caches: safetensors files on disk or on the Hub, tied to a tokenizer.

This package knows no model. It puts what a file holds into what a `SelfSpec` knows, and back.
"""

from selfspec.cache.contents import CacheContents, TokenizerInfo, tokenizer_info
from selfspec.cache.file import check_target, load_cache, save_cache
from selfspec.cache.remember import RememberedFile

__all__ = [
    "CacheContents",
    "RememberedFile",
    "TokenizerInfo",
    "check_target",
    "load_cache",
    "save_cache",
    "tokenizer_info",
]
