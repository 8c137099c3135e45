"""Building a cache: from texts, and from what a model predicts in them."""
