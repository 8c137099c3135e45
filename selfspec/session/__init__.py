"""The one driver of the engine: the line of prompts, what fits, and how fast they are read."""

from selfspec.session.line import ArrivalOrder, Scheduler, ShortestFirst
from selfspec.session.pace import ReadingPace
from selfspec.session.session import ReaderGone, Session

__all__ = ["ArrivalOrder", "ReaderGone", "ReadingPace", "Scheduler", "Session", "ShortestFirst"]
