"""`selfspec demo`: a few texts as they come, and the same ones timed against stock `generate()`."""
