"""`selfspec check`: measures what drafts bring with one model on this machine, and says it."""
