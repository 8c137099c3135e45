"""Code of our own for CPUs that can't calculate in half precision, compiled where it runs.

torch's own code for half precision takes one token after the other there. What is here does the
same sums in the same order, so to the same bits, for many tokens at once. It is compiled by LLVM,
in a fraction of a second, and works in torch's own threads. Where llvmlite or those threads are
missing, or other bits come out, there is none of it, and who asks goes another way.
"""

from selfspec.native.attention import Lines, attend, attends
from selfspec.native.projection import project, projects

__all__ = ["Lines", "attend", "attends", "project", "projects"]
