"""One forward over drafts: its layout, its KV, and how the model is run.

`selfspec.run.prepared` is the door: it says how a call's forwards are computed. Graphs and packed
weights stand behind it, and nothing outside this room asks which of them it is.
"""

__all__: list[str] = []
