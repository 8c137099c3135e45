"""`selfspec cache`: builds and inspects caches."""
