"""Forwards of fixed shape, captured as CUDA graphs, on KV slots that stay where they are."""

__all__: list[str] = []
