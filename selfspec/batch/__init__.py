"""Many prompts at once."""

__all__: list[str] = []
