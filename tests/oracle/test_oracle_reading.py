"""Receipts that somebody broke: one clear line with the place, and status 2, whatever is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polytoken.cli import main
from polytoken.errors import UsageError
from polytoken.oracle.compare.reading import read_comparable
from polytoken.oracle.compare.verdict import compare
from polytoken.oracle.receipt import encode, read_receipts

GOOD = Path(__file__).parent / "fixtures" / "transformers-hybrid.jsonl"
Records = list[dict[str, Any]]


def lines(records: Records) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def good() -> Records:
    return [json.loads(line) for line in GOOD.read_text().splitlines()]


def forward(**changed: Any) -> Callable[[], str]:
    """The good receipt with fields of its forward changed."""

    def made() -> str:
        records = good()
        place = next(record for record in records if record["event"] == "forward_reference")
        return lines([{**record, **changed} if record is place else record for record in records])

    return made


BROKEN: dict[str, tuple[Callable[[], str | bytes], str]] = {
    "nothing": (lambda: "", "holds no receipt"),
    "no records": (lambda: "[1, 2]\nplain text\n", "holds no receipt"),
    "cut off": (lambda: GOOD.read_text()[:900], "is not JSON"),
    "no text": (lambda: b"{\xff\xfe", "cannot read"),
    "no event": (lambda: '{"event": 3}\n', "line 1 has no event"),
    "too deep": (lambda: '{"event": "x", "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "line 1 is not JSON"),
    "not a number": (lambda: '{"event": "x", "a": NaN}\n', "NaN is no number"),
    "of tomorrow": (lambda: lines([{**good()[0], "schema": 2}, *good()[1:]]), "its schema is 2, and this polytoken"),
    "no ids": (forward(token_ids="abc"), "record 4 .forward_reference.: token_ids must be"),
    "no rows": (forward(top="abc"), "top must be"),
    "half a pair": (forward(top=[[[1]]]), "top must be"),
    "other sums": (forward(logsumexp=[1.0]), "as many as rows"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_receipt_is_refused_in_one_line_with_status_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = BROKEN[name]
    made, file = make(), tmp_path / "broken.jsonl"
    file.write_bytes(made if isinstance(made, bytes) else made.encode())
    with pytest.raises(UsageError, match=said):
        read_comparable(file)
    for words in ([str(file), str(GOOD)], [str(GOOD), str(file)]):
        assert main(["oracle", "compare", *words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("polytoken: error: ") and "broken.jsonl" in err


@pytest.mark.parametrize("junk", [None, "abc", [], {}, [[]], {"shape": 5, "sha256": "x"}])
def test_any_field_of_any_record_may_be_junk(junk: Any, tmp_path: Path) -> None:
    """Refused, or different: a comparison never breaks off with a defect."""
    records, file = [*good()[:5], *good()[-2:]], tmp_path / "junk.jsonl"
    for place, record in enumerate(records):
        for name in record:
            if name == "event":
                continue
            changed = [*records[:place], {**record, name: junk}, *records[place + 1 :]]
            file.write_text(lines(changed))
            try:
                read = read_comparable(file)
            except UsageError:
                continue
            for pair in ((records, read), (read, records)):
                assert json.dumps(compare(*pair).to_dict())


def test_a_text_may_hold_any_character(tmp_path: Path) -> None:
    """JSON may hold characters that end lines elsewhere."""
    file, text = tmp_path / "receipt.jsonl", "one\u2028two\x85three\rfour"
    file.write_text(encode("decode_reference_end", {"text": text}) * 2, encoding="utf-8", newline="\n")
    assert [record["text"] for record in read_receipts(file)] == [text, text]


FAILED: dict[str, Any] = {
    "event": "receipt_end",
    "exit_status": 2,
    "failure": {"code": "missing_extra", "field": None, "error": "torch is not installed"},
}


def test_receipts_of_runs_that_came_to_no_result_are_not_identical(tmp_path: Path) -> None:
    file = tmp_path / "failed.jsonl"
    for head in ([], [record for record in good() if record["event"] in ("receipt_start", "reference_prompt")]):
        file.write_text(lines([*head, FAILED]))
        with pytest.raises(UsageError, match="holds no result: its run ended with status 2: torch is not installed"):
            read_comparable(file)


def test_a_run_that_failed_differs_from_one_that_did_not_and_says_so() -> None:
    whole = good()
    assert whole[-1]["event"] == "receipt_end"
    found = compare(whole, [*whole[:-1], FAILED])
    assert found.verdict == "different" and found.semantic is not None and found.semantic.field == "exit_status"
    assert found.notes == ["of the second receipt: its run ended with status 2: torch is not installed"]
    assert compare(whole, whole).notes == []
    assert compare(whole, whole[:-1]).notes == [
        "of the second receipt: it is cut off: its last record is no receipt_end"
    ]


def test_a_snapshot_that_changed_is_located_though_digests_of_engines_differ() -> None:
    """Two engines' digests need not agree; that a digest stayed what it was before, must."""

    def suffix(before: str, after: str) -> Records:
        snapshot = {"lazy_kv": True, "trunk": before, "mtp": "m", "trunk_after": after, "mtp_after": "m"}
        return [{"event": "restored_suffix_reference", "step": 1, "snapshot": snapshot}]

    assert compare(suffix("a", "a"), suffix("b", "b")).verdict == "same law"
    found = compare(suffix("a", "a"), suffix("b", "c"))
    assert found.verdict == "different" and found.semantic is not None
    assert found.semantic.field == "snapshot.trunk_after" and found.semantic.right == "changed"
