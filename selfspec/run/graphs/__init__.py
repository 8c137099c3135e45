"""Forwards of fixed shape, captured as CUDA graphs, over KV slots with fixed addresses."""

__all__: list[str] = []
