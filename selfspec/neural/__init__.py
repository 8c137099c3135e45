"""Sources that compute: a small model that drafts, and the map of hidden states."""
