"""Workers on Ray: jobs are handed out, and handed out once more if a worker ends.

Knows nothing of models and texts: what a worker does with a job is given to it.
"""

from selfspec.fleet.cluster import Share, check_address, connected, divided
from selfspec.fleet.fleet import Fleet
from selfspec.fleet.jobs import Lost
from selfspec.fleet.worker import Work

__all__ = ["Fleet", "Lost", "Share", "Work", "check_address", "connected", "divided"]
