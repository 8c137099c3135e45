"""A model behind HTTP: requests become rows of one session, by the protocol of OpenAI."""

from selfspec.serving.answering import Answering
from selfspec.serving.app import application
from selfspec.serving.asked import Rules
from selfspec.serving.gate import Gate
from selfspec.serving.listening import Listening

__all__ = ["Answering", "Gate", "Listening", "Rules", "application"]
