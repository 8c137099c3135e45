"""selfspec's drafts inside other engines, which run the model and verify the drafts themselves."""
