"""Forwards of fixed shape over KV slots with fixed addresses, captured as CUDA graphs."""
