"""Building a cache folder: from texts, or from what a model itself says, to tables on disk.

What reads data is imported when a build runs, since `datasets` comes with the `cache` extra only.
"""
