"""What is true: the walk down a verified tree, and how a token is chosen."""
