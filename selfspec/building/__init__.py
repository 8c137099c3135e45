"""Building a cache: from texts, or from what a model predicts in them, to tables on disk.

`datasets` is imported when rows are read, since it comes with the `cache` extra only.
"""
