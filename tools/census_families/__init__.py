"""Families of models made small: their configs, prompts with images, and what drafts do there."""
