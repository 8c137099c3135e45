"""Programs that make what the repository holds; no part of the package, nor of a measurement."""
