"""Tool calls inside an answer: which markup a model writes them in, and reading it while it comes."""

from polytoken.text.toolcalls.markup import GEMMA4, GEMMA_FUNCTIONS, TAGGED, ToolMarkup, tool_markup
from polytoken.text.toolcalls.parser import ToolCallParser, parse_tool_calls

__all__ = [
    "GEMMA4",
    "GEMMA_FUNCTIONS",
    "TAGGED",
    "ToolCallParser",
    "ToolMarkup",
    "parse_tool_calls",
    "tool_markup",
]
