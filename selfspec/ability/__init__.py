"""What a model can verify: found out by trials of its structure, once for each of its states."""
