"""`selfspec chat`: a conversation in the terminal, from a typed question to its answer."""
