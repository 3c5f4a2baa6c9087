"""What stands between an answer and the next question: read off the chat template, not written down for one model."""

from __future__ import annotations

from typing import Final

from polytoken.errors import UsageError
from polytoken.oracle.subject import Ids, Subject
from polytoken.text.channels import opens_reasoning, split_reasoning

_FIRST: Final = "first question"
_ANSWER: Final = "ANSWERBETWEENMARKS"


class Turns:
    """The suffix that a user turn adds behind an answer, for one template.

    The template is rendered with a question, a marked answer and the next question; what follows the mark is the end of
    the answer's turn, the question, and the opening of the next answer.
    """

    def __init__(self, subject: Subject) -> None:
        self._tokenizer = subject.tokenizer
        self._eos_ids = subject.eos_ids

    def suffix(self, question: str, *, behind: int) -> Ids:
        """Ids that follow an answer whose last id is `behind`; an end id that the answer has itself is not repeated.

        Raises:
            UsageError: a template in which the answer cannot be found.
        """
        turns = [
            {"role": "user", "content": _FIRST},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": question},
        ]
        text = self._tokenizer.render_chat_template(turns, add_generation_prompt=True)
        _, mark, rest = text.partition(_ANSWER)
        if not mark:
            raise UsageError("the chat template drops earlier answers, so that nothing can follow one", field="--chat")
        ids = tuple(self._tokenizer.encode(rest, add_special_tokens=False))
        return ids[1:] if behind in self._eos_ids and ids and ids[0] == behind else ids

    @property
    def opens_reasoning(self) -> bool:
        """Whether the template's opening of an answer leaves a block of reasoning open."""
        text = self._tokenizer.render_chat_template([{"role": "user", "content": _FIRST}], add_generation_prompt=True)
        return opens_reasoning(text)


def split_answer(text: str, *, opened: bool) -> tuple[str | None, str]:
    """Reasoning, None where there is none, and answer, as servers send them to clients."""
    reasoning, content = split_reasoning(text, opened=opened)
    return reasoning or None, content
