"""Building a cache folder: from texts, or from what a model itself says, to tables on disk.

Nothing here is imported before a build runs: `datasets` is of the `cache` extra.
"""

__all__: list[str] = []
