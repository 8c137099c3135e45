"""Measures selfspec against plain decoding and against other drafters."""
