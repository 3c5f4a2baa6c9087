"""From a request to its events: scheduler, owner thread, JSON lines. Knows lanes by their contract only."""

from polytoken.engine.engine import Engine
from polytoken.engine.handle import Handle
from polytoken.engine.job import Label, Sink, TextPort, TextStep
from polytoken.engine.jsonl import read_requests
from polytoken.engine.limits import SchedulerLimits
from polytoken.engine.loaded import LoadedLane
from polytoken.engine.outcomes import error_of
from polytoken.engine.scheduler import Scheduler

__all__ = [
    "Engine",
    "Handle",
    "Label",
    "LoadedLane",
    "Scheduler",
    "SchedulerLimits",
    "Sink",
    "TextPort",
    "TextStep",
    "error_of",
    "read_requests",
]
