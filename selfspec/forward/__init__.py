"""A forward over drafts: prompts, layout, attention, keys and values, backends, their cost."""
