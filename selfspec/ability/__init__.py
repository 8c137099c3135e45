"""What a model can verify: found out by trials of its structure, once in every state."""
