"""Sources that compute: a small model that drafts, and heads that come with a model."""
