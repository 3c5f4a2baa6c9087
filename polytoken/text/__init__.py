"""Text to ids and ids to text: prompts, the visible text of a request, stop strings, reasoning."""

from polytoken.text.channels import ReasoningSplitter, ReasoningTags, opens_reasoning, split_reasoning
from polytoken.text.prompt import chat_ids, prompt_ids
from polytoken.text.stream import TextStep, TextStream

__all__ = [
    "ReasoningSplitter",
    "ReasoningTags",
    "TextStep",
    "TextStream",
    "chat_ids",
    "opens_reasoning",
    "prompt_ids",
    "split_reasoning",
]
