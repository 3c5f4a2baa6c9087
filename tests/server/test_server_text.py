"""Prompts and answers as text over HTTP: the reference's ids, every byte back, and streams that know nothing of each
other."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import Script
from server_running import Running

import polytoken
from polytoken.testkit.tiny import write_checkpoint
from polytoken.testkit.tokenizer import StyleName

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PARAMETERS = {"type": "object", "properties": {"count": {"type": "integer"}, "name": {"type": ["string", "null"]}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}


def content_of(chunks: list[Any], name: str = "content") -> str:
    return "".join(c["choices"][0]["delta"].get(name) or "" for c in chunks[:-1] if c["choices"])


@pytest.mark.parametrize("stop", [["END"], "END", ["END", "never"]])
@pytest.mark.parametrize("group", [1, 3, 100])
def test_stop_strings_count_in_the_answer_alone(scripted: Running, script: Script, stop: Any, group: int) -> None:
    """A20: reasoning that names the stop string does not end the request; the answer does."""
    script.says, script.group = lambda prompt: "<think>I stop at END, they said: END</think>Here it is. END more", group
    body = {"messages": [{"role": "user", "content": "x"}], "stop": stop, "max_tokens": 200}
    _, record = scripted.post(CHAT, body)
    message = record["choices"][0]["message"]
    assert message["content"] == "Here it is. "
    assert message["reasoning_content"] == "I stop at END, they said: END"
    assert record["choices"][0]["finish_reason"] == "stop"
    chunks = scripted.stream(CHAT, body)
    assert content_of(chunks) == "Here it is. "
    assert content_of(chunks, "reasoning_content") == message["reasoning_content"]
    claude = {**body, "stop_sequences": [stop] if isinstance(stop, str) else stop}
    del claude["stop"]
    _, record = scripted.post("/v1/messages", claude)
    assert (record["stop_reason"], record["stop_sequence"]) == ("stop_sequence", "END")
    assert record["content"][-1]["text"] == "Here it is. "


@pytest.fixture(scope="module")
def beginners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Models whose template writes a begin token, and whose tokenizer puts one in front of every text, too."""
    engines = {}
    for family in ("gemma3_text", "llama"):
        path = write_checkpoint(tmp_path_factory.mktemp(family), family, seed=1).path
        add_begin(path)
        engines[family] = polytoken.load(path)
    with Running(engines) as running:
        yield running


def add_begin(path: Path) -> None:
    """Let the tokenizer itself write its begin token, as llama's and Gemma's releases do."""
    record = json.loads((path / "tokenizer.json").read_text())
    config = json.loads((path / "tokenizer_config.json").read_text())
    text = config["bos_token"]
    index = next(token["id"] for token in record["added_tokens"] if token["content"] == text)
    begin = {"SpecialToken": {"id": text, "type_id": 0}}
    record["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(record))
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_the_begin_token_comes_once(beginners: Running, family: str) -> None:
    """B01: the server's prompt has the reference's ids on every endpoint, and one begin token where a text has one."""
    engine = beginners.state.pool.loaded[family].engine
    tokenizer = engine.tokenizer
    assert tokenizer.encode("a", add_special_tokens=True)[0] == tokenizer.bos_id  # it does write one
    turns = [{"role": "user", "content": "hello"}]
    reference = tokenizer.fast.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=False)
    prompts = read_prompts(beginners, family)
    words = {"model": family, "max_tokens": 1}
    for path, body in (
        (CHAT, {"messages": turns}),
        ("/v1/messages", {"messages": turns}),
        ("/v1/responses", {"input": turns, "max_output_tokens": 1}),
        (CHAT, {"messages": turns, "metadata": {"session_id": "s"}}),
    ):
        assert beginners.post(path, {**words, **body})[0] == 200
        assert prompts.pop() == list(reference), path
    text = tokenizer.decode([tokenizer.bos_id])
    for prompt in ("hello", text + "hello"):
        assert beginners.post(TEXT, {**words, "prompt": prompt})[0] == 200
        ids = prompts.pop()
        assert ids == tokenizer.encode("hello", add_special_tokens=True), prompt
        assert ids.count(tokenizer.bos_id) == 1


def read_prompts(server: Running, name: str) -> list[list[int]]:
    """A list that gets the ids of every prompt which the lane opens."""
    seen: list[list[int]] = []

    def watch(loaded: Any) -> None:
        inner = loaded.lane.open

        def open_row(request: Any, ids: Any) -> Any:
            seen.append(list(ids))
            return inner(request, ids)

        loaded.lane.open = open_row

    server.state.pool.loaded[name].engine.call(watch)
    return seen


def odd_texts(count: int) -> Iterator[str]:
    """Spaces, tabs, line ends, code, emoji and scripts, mixed."""
    parts = [
        " ", "  ", "\t", "\r\n", "\n\n", "a", "Wort", "def f(x):\n\treturn x", "{'k': \"v\"}", "é", "ö",
        "🧑🏽‍🚀", "👨‍👩‍👧", "नमस्ते", "漢字", "\u00a0",
        "\\n", "```", "Ġ", "Ċ", "â", "'s", "1234567", "<b>", "\u200d", "ﬁ", "\x7f",
    ]  # fmt: skip
    rng = random.Random(5)
    for _ in range(count):
        yield "x" + "".join(rng.choice(parts) for _ in range(rng.randrange(1, 12)))


@pytest.mark.parametrize("style", ["qwen", "gemma4"])
def test_every_text_comes_back_as_it_was(tmp_path: Path, style: StyleName) -> None:
    """B05: 200 texts through prompt and answer, whole and streamed; no byte symbol of the vocabulary is shown."""
    from scripted import scripted_engine  # noqa: PLC0415

    script = Script(group=3)
    script.says = lambda prompt: prompt  # what was read is said again
    with Running({"echo": scripted_engine(tmp_path, script, style=style)}) as server:
        for number, text in enumerate(odd_texts(200)):
            body = {"prompt": text, "max_tokens": 400}
            if number % 4:
                _, record = server.post(TEXT, body)
                assert record["choices"][0]["text"] == text
            else:
                chunks = server.stream(TEXT, body)
                assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == text


def test_streams_beside_each_other_are_what_they_are_alone(scripted: Running, script: Script) -> None:
    """A24: reasoning, calls, quoted markup and plain text, interleaved token by token."""
    call = '<tool_call>\n{"name": "look", "arguments": {"a": "</think>"}}\n</tool_call>'
    texts = {
        "one": "<think>long thoughts about <tool_call></think>The answer.",
        "two": f"Wait.\n{call}\n{call}",
        "three": "Tags such as <think> and `<tool_call>` are text here.",
        "four": "<think>never closed, <tool_call> or not",
    }
    script.says = lambda prompt: next(text for name, text in texts.items() if f"\n{name}<" in prompt)

    def stream(name: str) -> list[Any]:
        body = {"messages": [{"role": "user", "content": name}], "tools": [TOOL], "max_tokens": 400}
        chunks = scripted.stream(CHAT, body)
        deltas = [dict(c["choices"][0]["delta"]) for c in chunks[:-1]]
        for delta in deltas:
            for step in delta.get("tool_calls", ()):
                step.pop("id", None)  # drawn anew for every answer
        return [*deltas, chunks[-2]["choices"][0]["finish_reason"]]

    alone = {name: stream(name) for name in texts}
    assert alone["two"][-1] == "tool_calls"
    script.pace = 0.001
    beside: dict[str, list[Any]] = {}
    threads = [threading.Thread(target=lambda n=name: beside.update({n: stream(n)})) for name in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def joined(deltas: list[Any]) -> list[Any]:
        """The deltas as sums: how they are cut may differ."""
        sums = {name: "".join(d.get(name) or "" for d in deltas[:-1]) for name in ("content", "reasoning_content")}
        calls = [step for d in deltas[:-1] for step in d.get("tool_calls", ())]
        names = [step["function"]["name"] for step in calls if "name" in step["function"]]
        return [sums, names, "".join(step["function"]["arguments"] for step in calls), deltas[-1]]

    assert {name: joined(deltas) for name, deltas in beside.items()} == {n: joined(d) for n, d in alone.items()}


@pytest.mark.parametrize("group", [1, 1000])
def test_an_answer_of_one_call_alone_has_content(scripted: Running, script: Script, group: int) -> None:
    """A08, A09: content is null, never missing, and the stream has one finish reason."""
    script.says, script.group = lambda prompt: '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', group
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "max_tokens": 200}
    _, record = scripted.post(CHAT, body)
    message = record["choices"][0]["message"]
    assert (message["role"], message["content"], len(message["tool_calls"])) == ("assistant", None, 1)
    chunks = scripted.stream(CHAT, body)
    assert [r for c in chunks[:-1] if (r := c["choices"][0]["finish_reason"])] == ["tool_calls"]
    assert content_of(chunks) == ""


WRITTEN = {
    '{"count": 5.0}': {"count": 5},
    '{"flag": True}': {"flag": True},
    '{"count": 5,}': {"count": 5},
    "{'name': 'it'}": {"name": "it"},
    '{"name": null}': {"name": None},
    '{"name": None}': {"name": None},
    '{"deep": {"a": [1, {"b": []}]}}': {"deep": {"a": [1, {"b": []}]}},
    "{}": {},
    '{"count": 5.5}': {"count": 5.5},
}


@pytest.mark.parametrize("written", WRITTEN)
def test_calls_are_kept_whatever_their_form(scripted: Running, script: Script, written: str) -> None:
    """A30: nearly-JSON is read where nothing is lost by it; the arguments are always JSON."""
    script.says = lambda prompt: f'<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call>'
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "max_tokens": 400}
    _, record = scripted.post(CHAT, body)
    (call,) = record["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == WRITTEN[written]
    steps = [s for c in scripted.stream(CHAT, body)[:-1] for s in c["choices"][0]["delta"].get("tool_calls", ())]
    assert json.loads("".join(step["function"]["arguments"] for step in steps)) == WRITTEN[written]


@pytest.mark.parametrize("group", [1, 1000])
def test_arguments_that_cannot_be_read_come_as_they_stand(scripted: Running, script: Script, group: int) -> None:
    """A30: no call is dropped, and Anthropic's clients get an object all the same."""
    script.says = lambda prompt: '<tool_call>\n{"name": "look", "arguments": {"a": <<}}\n</tool_call> done'
    script.group = group
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "max_tokens": 400}
    _, record = scripted.post(CHAT, body)
    (call,) = record["choices"][0]["message"]["tool_calls"]
    assert "<<" in call["function"]["arguments"]
    claude = {**body, "tools": [{"name": "look", "input_schema": {"type": "object"}}]}
    _, record = scripted.post("/v1/messages", claude)
    (use,) = [block for block in record["content"] if block["type"] == "tool_use"]
    assert "<<" in json.dumps(use["input"])
