"""`selfspec generate`: one prompt in, its continuation out, through files or pipes."""
