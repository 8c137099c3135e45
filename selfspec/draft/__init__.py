"""What to guess: sources of candidates, how likely each is, and the tree that is grown of them."""
