"""Running states that branch: rules over trees, the states of rows, and the seam in a model."""
