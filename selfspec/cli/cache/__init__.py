"""`selfspec cache`: builds, inspects and merges caches."""
