"""`selfspec cache`: builds, inspects, merges and verifies cache folders."""
