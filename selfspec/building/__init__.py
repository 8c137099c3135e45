"""Building a cache: from texts, or from what a model itself says, to tables on disk.

`datasets` is imported when rows are read, since it comes with the `cache` extra only.
"""
