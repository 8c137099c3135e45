"""Many prompts over one model: rows that come and go, and which prompt is next."""

from selfspec.batch.answers import Answer
from selfspec.batch.many import generate_many
from selfspec.session import ArrivalOrder, Scheduler, ShortestFirst

__all__ = ["Answer", "ArrivalOrder", "Scheduler", "ShortestFirst", "generate_many"]
