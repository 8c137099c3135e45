"""What drives engines: for one prompt, or for many that wait, within a memory and at a pace."""

from selfspec.row import ReaderGone
from selfspec.session.alone import decode
from selfspec.session.line import ArrivalOrder, ReadingPace, Scheduler, ShortestFirst
from selfspec.session.session import Session

__all__ = [
    "ArrivalOrder",
    "ReaderGone",
    "ReadingPace",
    "Scheduler",
    "Session",
    "ShortestFirst",
    "decode",
]
