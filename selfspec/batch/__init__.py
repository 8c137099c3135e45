"""Many prompts over one model: rows that come and go, and which prompt is next."""

from selfspec.batch.many import generate_many
from selfspec.batch.prompt_call import Answer
from selfspec.batch.schedule import ArrivalOrder, Scheduler, ShortestFirst

__all__ = ["Answer", "ArrivalOrder", "Scheduler", "ShortestFirst", "generate_many"]
