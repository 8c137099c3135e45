"""`selfspec tune`: fits one tree to a model and a machine, and draws it."""
