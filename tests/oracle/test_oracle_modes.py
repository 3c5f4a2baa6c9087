"""Every mode of `oracle run` on a tiny hybrid: what it writes, and how the modes agree with each other."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from oracle_runs import timeless, undescribed

from polytoken.checkpoint.inspect import inspect
from polytoken.errors import UsageError
from polytoken.oracle.modes.chat import ProgressReport
from polytoken.oracle.schema import violations

MODES: list[dict[str, Any]] = [
    {"mode": "forward"},
    {"mode": "decode", "max_new_tokens": 6},
    {"mode": "mtp"},
    {"mode": "ar"},
    {"mode": "mtp-prefill"},
    {"mode": "mtp-generate"},
]


@pytest.mark.parametrize("plan", MODES, ids=lambda plan: plan["mode"])
def test_every_mode_writes_a_receipt_that_fits_the_schema(run: Run, hybrid: str, plan: dict[str, Any]) -> None:
    ran = run(hybrid, **plan)
    assert violations(ran.records) == [] and undescribed(ran.records) == set()
    end = ran.records[-1]
    assert (end["exit_status"], end["failure"], end["records"]) == (0, None, len(ran.records) - 1)
    assert ran.noted("reference_canary_summary") == [
        {
            "event": "reference_canary_summary",
            "enabled": False,
            "probe": None,
            "threads": None,
            "samples": [],
            "incomplete": False,
        }
    ]


@pytest.mark.parametrize("plan", [{"mode": "mtp-generate", "seed": 3}, {"mode": "ar", "seed": 3}], ids=["mtp", "ar"])
def test_K03_a_second_run_gives_the_same_receipt(run: Run, hybrid: str, plan: dict[str, Any]) -> None:
    first, second = run(hybrid, **plan), run(hybrid, **plan)
    assert timeless(first.records) == timeless(second.records)
    loaded = first.one("reference_loaded")
    assert len(loaded["checkpoint_sha256"]) == 64
    environment = first.one("receipt_start")["environment"]
    assert {"mlx", "polytoken"} <= set(environment["versions"])
    assert environment["command"] and environment["date"].endswith("Z") and {"commit", "power"} <= set(environment)


def test_decode_goes_on_from_the_forward_and_ends_at_an_end_id(run: Run, hybrid: str) -> None:
    ran = run(hybrid, mode="decode")
    forward, steps, end = ran.one("forward_reference"), ran.of("decode_reference"), ran.one("decode_reference_end")
    assert steps[0]["token_id"] == forward["argmax"][-1]
    assert [step["argmax"] for step in steps[:-1]] == [step["token_id"] for step in steps[1:]]
    assert end["finish_reason"] == "eos" and end["eos_token"] in end["eos_token_ids"]
    assert end["token_ids"] == [step["token_id"] for step in steps]


def test_the_lanes_prefill_gives_the_bits_of_one_forward_whatever_the_chunks(run: Run, hybrid: str) -> None:
    last = run(hybrid, mode="forward").one("forward_reference")["row_sha256"][-1]
    for chunk in (5, 16, 256):
        assert run(hybrid, mode="ar", chunk=chunk, max_new_tokens=1).one("ar_prefill_reference")["logits"] == {
            "shape": [1, 320],
            "sha256": last,
        }


def test_a_round_by_hand_verifies_what_single_steps_give(run: Run, hybrid: str) -> None:
    """Row j of the verify forward has the bits of the j-th greedy step, as far as drafts are right (K01 on the CPU)."""
    steps = [step["row_sha256"] for step in run(hybrid, mode="decode", max_new_tokens=6).of("decode_reference")]
    ran = run(hybrid, mode="mtp")
    ops = {record["op"]: record for record in ran.of("mtp_reference")}
    assert ops["continuation"]["token_ids"] == [ops["verify"]["argmax"][ran.one("mtp_reference_end")["keep"] - 1]]
    assert ops["continuation"]["logits"]["sha256"] == steps[ran.one("mtp_reference_end")["keep"]]
    assert [record["depth"] for record in ran.of("mtp_reference") if record["op"] == "draft"] == [0, 1, 2]
    assert ops["commit"]["offset"] == ops["history"]["offset"] + 1


def test_the_windows_of_a_prefill_differ_in_history_alone(run: Run, hybrid: str) -> None:
    ran = run(hybrid, mode="mtp-prefill")
    whole, part = ran.of("mtp_prefill_reference")
    n = len(whole["token_ids"])
    assert [note["token_ids"] for note in ran.noted("reference_encoded")] == [whole["token_ids"]]
    told = [note for note in ran.noted("mtp_prefill_progress") if note["phase"] == "completed"]
    assert len(told) == 2 and {"cached_tokens", "chunk_size"} <= set(told[0])
    assert (told[0]["tokens_done"], told[0]["new_prefill_tokens"]) == (n, n)
    assert (whole["window"], whole["offset"], whole["base"]) == (None, n - 1, 0)
    assert (part["window"], part["offset"], part["base"]) == (3, 3, n - 4)
    assert (whole["logits"], whole["hidden"], whole["token"]) == (part["logits"], part["hidden"], part["token"])
    assert whole["draft_logits"] != part["draft_logits"]


def test_the_cycles_of_a_generation_reproduce_its_tokens(run: Run, hybrid: str) -> None:
    end = run(hybrid, mode="mtp-generate", seed=2).one("mtp_generation_end")
    tokens = [end["cycles"][0]["primary"]] if end["cycles"] else end["tokens"]
    for cycle in end["cycles"]:
        behind = cycle["correction"] if cycle["correction"] is not None else cycle["bonus"]
        tokens += cycle["drafts"][: cycle["accepted"]] + ([] if behind is None else [behind])
    assert tokens == end["tokens"]
    assert end["finish_reason"] == "stop"


def test_greedy_ar_and_mtp_give_the_same_tokens_and_final_logits(run: Run, hybrid: str) -> None:
    ar = run(hybrid, mode="ar", temperature=0.0).one("ar_reference_end")
    mtp = run(hybrid, mode="mtp-generate", temperature=0.0).one("mtp_generation_end")
    assert (ar["tokens"], ar["text"]) == (mtp["tokens"], mtp["text"])
    assert ar["final_logits"] == mtp["logits"]


def test_a_head_that_reads_rows_before_the_norm_has_final_logits_too(run: Run, hybrid: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(hybrid, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "mtp_contract": {"base_hidden_variant": "pre"}}))
    assert inspect(path).draft_head_reads == "pre"
    ar = run(str(path), mode="ar", temperature=0.0).one("ar_reference_end")
    mtp = run(str(path), mode="mtp-generate", temperature=0.0).one("mtp_generation_end")
    assert (ar["tokens"], ar["final_logits"]) == (mtp["tokens"], mtp["logits"]) and mtp["logits"] is not None


@pytest.mark.parametrize("restore", [False, True])
def test_suffixes_behind_a_live_or_restored_state_have_the_bits_of_a_cold_prompt(
    run: Run, hybrid: str, text_file: Path, restore: bool
) -> None:
    plan = {"mode": "mtp-generate", "restored_suffixes": text_file, "snapshot_restore": restore, "max_new_tokens": 8}
    ran = run(hybrid, **plan)
    assert violations(ran.records) == [] and undescribed(ran.records) == set()
    suffixes = ran.of("restored_suffix_reference")
    assert [record["step"] for record in suffixes] == [0, 1, 2]
    for record in suffixes:
        assert record["matches_cold"] == {"trunk": True, "mtp": True, "logits": True}
        total = record["cached_tokens"] + len(record["token_ids"])
        assert record["chunks"][-1]["tokens_done"] == total and record["history_offset"] == total - 1
        snapshot = record["snapshot"]
        assert (snapshot is None) is not restore
        if snapshot is not None:
            assert (snapshot["trunk"], snapshot["mtp"]) == (snapshot["trunk_after"], snapshot["mtp_after"])
    assert len(ran.noted("snapshot_restored")) == (3 if restore else 0)


@pytest.mark.parametrize("mode", ["ar", "mtp-generate"])
def test_a_chat_of_three_turns_reuses_its_own_prompt(run: Run, hybrid: str, text_file: Path, mode: str) -> None:
    ran = run(hybrid, mode=mode, chat=True, readme=text_file)
    assert violations(ran.records) == [] and undescribed(ran.records) == set()
    turns = ran.of("chat_turn")
    assert [turn["step"] for turn in turns] == [0, 1, 2] and ran.one("chat_end")["turns"] == 3
    assert turns[0]["cached_tokens"] == 0
    for before, turn in pairwise(turns):
        assert turn["prompt_ids"][: len(before["prompt_ids"])] == before["prompt_ids"]
        assert turn["cached_tokens"] >= (len(before["prompt_ids"]) - 1) // 16 * 16
        assert turn["finish_reason"] == "stop"
    # The same conversation without a bank gives the same tokens: a hit changes no bit.
    assert [turn["logits"] for turn in turns] == [
        turn["logits"] for turn in run(hybrid, mode=mode, chat=True, readme=text_file).of("chat_turn")
    ]


def test_a_chat_that_does_not_end_by_itself_is_a_named_failure(run: Run, hybrid: str, text_file: Path) -> None:
    ran = run(hybrid, mode="ar", chat=True, readme=text_file, temperature=0.0, check=False, seed=1)
    if ran.error is not None:  # greedy answers may loop
        assert (ran.error.code, ran.error.exit_status) == ("no_natural_end", 3)
        assert ran.records[-1]["failure"]["code"] == "no_natural_end"


def test_progress_is_one_line_a_second_and_only_for_new_tokens() -> None:
    now, told = [0.0], []
    report = ProgressReport(told.append, clock=lambda: now[0])
    for at, ids in ((0.0, (1,)), (0.5, (2, 3)), (1.0, ()), (1.0, (4,)), (1.5, (5,)), (2.1, (6,))):
        now[0] = at
        report(ids)
    assert told == [1, 4, 6]


def test_canvas_writes_every_denoise(run: Run, canvas: str) -> None:
    ran, again = (run(canvas, mode="canvas", max_new_tokens=9, seed=4) for _ in range(2))
    assert violations(ran.records) == [] and undescribed(ran.records) == set()
    steps, end = ran.of("canvas_reference"), ran.one("canvas_reference_end")
    assert [step["step"] for step in steps] == list(range(1, end["denoise_steps"] + 1))
    assert [token for step in steps for token in step["committed"]] == end["tokens"]
    assert len({step["state"] for step in steps}) > 1
    assert timeless(ran.records) == timeless(again.records)


def test_canvas_of_another_kind_of_model_is_a_usage_error(run: Run, hybrid: str) -> None:
    ran = run(hybrid, mode="canvas", check=False)
    assert isinstance(ran.error, UsageError) and ran.records[-1]["exit_status"] == 2


def test_a_mode_that_needs_a_head_says_so(run: Run, dense: str) -> None:
    ran = run(dense, mode="mtp", check=False)
    assert ran.error is not None and ran.error.code == "no_draft_head"
