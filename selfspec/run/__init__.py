"""How one model is run: `run.run.Run` says what it can verify and what runs its forwards.

Nothing outside this room asks whether forwards use captured graphs, packed or streamed weights.
"""

__all__: list[str] = []
