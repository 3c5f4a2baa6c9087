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


def cut_rows(count: int) -> str:
    top, sums = good()[3]["top"], good()[3]["logsumexp"]
    return forward(top=top[:count], logsumexp=sums[:count])()


def each_row(change: Callable[[Any], Any]) -> str:
    return forward(top=[change(row) for row in good()[3]["top"]])()


BROKEN: dict[str, tuple[Callable[[], str | bytes], str]] = {
    "nothing": (lambda: "", "holds no receipt"),
    "no records": (lambda: "[1, 2]\nplain text\n", "holds no receipt"),
    "cut off": (lambda: GOOD.read_text()[:900], "holds no result: it is cut off"),
    "cut in the middle": (lambda: GOOD.read_text().replace('"top":', '"top"\n', 1), "line 4 is not JSON"),
    "no text": (lambda: b"{\xff\xfe", "cannot read"),
    "no event": (lambda: '{"event": 3}\n', "line 1 has no event"),
    "too deep": (lambda: '{"event": "x", "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "line 1 is not JSON"),
    "not a number": (lambda: '{"event": "x", "a": NaN}\n', "NaN is no number"),
    "of tomorrow": (lambda: lines([{**good()[0], "schema": 2}, *good()[1:]]), "its schema is 2, and this polytoken"),
    "no ids": (forward(token_ids="abc"), "record 4 .forward_reference.: token_ids must be"),
    "no rows": (forward(top="abc"), "top must be"),
    "half a pair": (forward(top=[[[1]]]), "top must be"),
    "other sums": (forward(logsumexp=[1.0]), "logsumexp must have as many items as top has rows"),
    "an infinite number": (lambda: lines(good()).replace('"step": 1,', '"step": 1e999,'), "1e999 is no number"),
    "of a half schema": (lambda: lines([{**good()[0], "schema": True}, *good()[1:]]), "its schema is True"),
    "nothing stated": (
        lambda: lines([{"event": record["event"]} for record in good()[1:]]),
        "does not state token_ids",
    ),
    "two receipts": (lambda: lines(good() * 2), "receipt_end.: a receipt begins and ends once"),
    "the end first": (lambda: lines([good()[-1], *good()[:-1]]), "receipt_end.: a receipt begins and ends once"),
    "fewer rows": (lambda: cut_rows(2), "argmax must have as many items as top has rows, 2"),
    "rows upside down": (lambda: each_row(lambda row: row[::-1]), "the largest first"),
    "an id twice": (lambda: each_row(lambda row: [row[0], row[0]]), "every id once"),
    "half an id": (lambda: each_row(lambda row: [[row[0][0] + 0.5, row[0][1]]]), "pairs of id and number"),
    "another choice": (forward(argmax=[0] * len(good()[3]["argmax"])), "argmax must be the first id of top"),
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


def test_a_receipt_may_be_cut_off_within_a_line_or_marked_by_a_shell(tmp_path: Path) -> None:
    file, text = tmp_path / "receipt.jsonl", GOOD.read_text()
    file.write_bytes(text[:-5].encode())
    assert read_comparable(file) == good()[:-1]
    file.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert read_comparable(file) == good()


def test_a_receipt_without_its_beginning_is_compared_with_a_note() -> None:
    assert compare(good(), good()[1:]).notes == [
        "of the second receipt: it lacks its beginning: its first record is no receipt_start"
    ]


def test_choices_are_compared_where_one_side_has_no_rows() -> None:
    """Other programs may state the likeliest ids alone."""
    bare = [{k: v for k, v in record.items() if k not in ("top", "logsumexp", "row_sha256")} for record in good()]
    assert compare(good(), bare).verdict == "same law"
    wrong = [{**r, "argmax": [1] * len(r["argmax"])} if r["event"] == "forward_reference" else r for r in bare]
    for pair in ((good(), wrong), (wrong, good()), (bare, wrong)):
        found = compare(*pair)
        assert found.verdict == "different" and found.semantic is not None
        assert found.semantic.field.startswith("argmax[")


def test_what_somebody_wrote_cannot_move_the_cursor_of_who_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.jsonl"
    for word in ("a\x1b[31m\nb", "\ud800", "x" * 500):
        file.write_text(lines([*good()[:3], {"event": word, word: word}, *good()[3:]]))
        assert main(["oracle", "compare", str(GOOD), str(file)]) == 3
        out, _ = capsys.readouterr()
        assert out.count("\n") == 1 and out[:-1].isprintable() and len(out) < 400


def answered(**changed: Any) -> Records:
    """A sampled answer of two ids, with the laws at both places."""
    end = {"event": "ar_reference_end", "tokens": [5, 7], "top": [[[5, -0.5], [6, -1.5]], [[7, -0.1], [8, -3.0]]]}
    start = {"event": "receipt_start", "schema": 1, "engine": "e 1", "mode": "ar", "lane": "ar"}
    return [start, end | {"seed": 0, "temperature": 0.6, "top_p": 0.95, "top_k": 20} | changed]


@pytest.mark.parametrize("field", ["seed", "temperature", "top_p", "top_k"])
def test_draws_that_were_asked_for_otherwise_are_no_near_tie(field: str) -> None:
    for pair in (
        (answered(), answered(**{field: 0.5, "tokens": [6, 7]})),
        (answered(**{field: 0.5, "tokens": [6, 7]}), answered()),
    ):
        found = compare(*pair)
        assert found.verdict == "different" and found.semantic is not None and found.semantic.field == field


def test_one_law_and_one_seed_draw_one_id_in_one_engine() -> None:
    other = answered(tokens=[6, 7])
    found = compare(answered(), other)
    assert found.verdict == "different" and "one law and one seed drew two ids" in found.explain()
    other[0]["engine"] = "f 1"  # draws of its own
    assert compare(answered(), other).verdict == "same law"
    other[0]["engine"], other[1]["top"][0][0][1] = "e 1", -0.5001  # a law that rounding moved
    assert compare(answered(), other).verdict == "same law"


def test_receipts_of_two_modes_say_so() -> None:
    other = answered()
    other[0]["mode"] = "decode"
    found = compare(answered(), other)
    assert found.explain() == "different: record 0 (receipt_start), field mode: 'ar' against 'decode'"


def test_times_of_a_gate_are_not_compared_and_its_numbers_only_by_bits() -> None:
    def gate(**changed: Any) -> Records:
        check = {"event": "gate_check", "check": "law", "case": {}, "verdict": "identical", "detail": {"z": 1.0}}
        cost = {"event": "gate_cost", "rows": 3, "seconds_free": 1.0, "seconds_fixed": 2.0, "ratio": 2.0}
        return [{name: changed.get(name, value) for name, value in record.items()} for record in (check, cost)]

    assert compare(gate(), gate(seconds_free=1.5, ratio=1.4)).verdict == "identical"
    assert compare(gate(), gate(detail={"z": 1.1})).verdict == "same law"
    assert compare(gate(), gate(verdict="near tie")).verdict == "different"
    assert compare(gate(), gate(rows=4)).verdict == "different"


def test_a_canvas_is_measured_within_the_tolerance_of_its_type() -> None:
    def canvas(mean: float, dtype: str = "float32") -> Records:
        statistics = {"confidence": {"sha256": str(mean), "mean": mean, "least": 0.1}}
        loaded = {"event": "reference_loaded", "dtype": dtype}
        return [loaded, {"event": "canvas_reference", "step": 1, "token_ids": [1], "statistics": statistics}]

    assert compare(canvas(0.5), canvas(0.5001)).verdict == "same law"
    found = compare(canvas(0.5), canvas(0.6))
    assert found.semantic is not None and found.semantic.field == "statistics.confidence.mean"
    assert compare(canvas(0.5), canvas(0.6, "bfloat16")).verdict == "same law"
