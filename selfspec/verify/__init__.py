"""What is true: the walk down a verified tree, and how each token on it is chosen."""
