"""Flags that exclude or need each other, named failures and their exit statuses."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conftest import Run
from safetensors.numpy import load_file, save_file

from polytoken.assembly import EngineOptions
from polytoken.cli import main
from polytoken.cli.interrupts import Terminated
from polytoken.errors import NonFiniteError, UsageError
from polytoken.oracle.digests import describe_rows
from polytoken.oracle.fingerprint import fetch, fingerprints
from polytoken.oracle.plan import Plan, choose_mode
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.run import run_oracle
from polytoken.oracle.schema import violations
from polytoken.testkit.tiny import write_checkpoint

HERE = Path(__file__)
SOURCED: dict[str, Any] = {
    "mode": "ar", "chat": True, "readme": HERE, "source_run": HERE, "server_defaults": True
}  # fmt: skip
BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("--restored-suffixes", {"mode": "ar", "restored_suffixes": HERE}),
    ("--snapshot-restore", {"mode": "mtp-generate", "snapshot_restore": True}),
    ("--chat", {"mode": "ar", "chat": True}),
    ("--chat", {"mode": "decode", "chat": True, "readme": HERE}),
    ("--chat", {"mode": "mtp-generate", "chat": True, "readme": HERE, "restored_suffixes": HERE}),
    ("--source-run", {"mode": "ar", "source_run": HERE, "server_defaults": True}),
    ("--source-run", {"mode": "ar", "source_run": HERE, "chat": True, "readme": HERE}),
    ("--token-events", {"mode": "ar", "token_events": "progress"}),
    ("--temperature", {"mode": "decode", "temperature": 0.6}),
    ("--temperature", {"mode": "ar", "temperature": 0.6, "server_defaults": True}),
    ("--top-p", {"mode": "canvas", "top_p": 0.95}),
    ("--top-k", {"top_k": 20}),
    ("--seed", {"mode": "mtp", "seed": 0}),
    ("--seed", {**SOURCED, "seed": 0}),
    ("--max-new-tokens", {**SOURCED, "max_new_tokens": 3}),
    ("--max-new-tokens", {"mode": "mtp-prefill", "max_new_tokens": 3}),
    ("--depth", {"mode": "ar", "depth": 3}),
    ("--canary", {"canary": "native"}),
    ("--canary-library", {"canary": "off", "canary_library": HERE}),
]


@pytest.mark.parametrize(("flag", "plan"), BROKEN)
def test_flags_that_do_not_go_together_are_usage_errors(flag: str, plan: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Plan(**plan)
    assert caught.value.field == flag and caught.value.exit_status == 2


def test_only_one_mode_at_a_time() -> None:
    assert choose_mode(decode=False, mtp_prefill=True) == "mtp-prefill"
    assert choose_mode(decode=False) == "forward"
    with pytest.raises(UsageError, match="--decode excludes --mtp"):
        choose_mode(decode=True, mtp=True)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with one weight that is not a number."""
    path = write_checkpoint(tmp_path_factory.mktemp("nan"), "qwen3", seed=1).path
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith("down_proj.weight"))
    tensors[name] = tensors[name].copy()
    tensors[name][0, 0] = np.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return str(path)


def test_numbers_that_are_not_finite_are_a_failure_of_their_own(run: Run, poisoned: str) -> None:
    for mode in ("forward", "ar"):
        ran = run(poisoned, mode=mode, check=False)
        assert isinstance(ran.error, NonFiniteError) and ran.error.exit_status == 4
        assert ran.records[-1]["failure"]["code"] == "non_finite"
        assert violations(ran.records) == []


def test_the_command_line_prints_receipts_on_stdout_and_to_a_file(
    dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "receipt.jsonl"
    assert main(["oracle", "run", "--model", dense, "--ar", "--max-new-tokens", "3", "--output", str(output)]) == 0
    out, err = capsys.readouterr()
    assert output.read_text() == out
    assert violations([json.loads(line) for line in out.splitlines()]) == []
    notes = [json.loads(line)["event"] for line in err.splitlines() if line.startswith("{")]
    assert {"reference_loading", "ar_prefill_progress", "ar_token", "reference_canary_summary"} <= set(notes)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--decode", "--ar"], 2),
        (["--chat", "--ar"], 2),
        (["--readme", "/nowhere/readme"], 2),
        (["--mtp"], 2),  # a model without a head
        (["--output", "/nowhere/out"], 2),
        (["--ar", "--top-p", "7"], 2),
        (["--ar", "--canary", "bogus"], 2),
    ],
)
def test_usage_errors_leave_with_status_2_and_one_line(
    dense: str, words: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["oracle", "run", "--model", dense, *words]) == status
    err = capsys.readouterr().err
    assert len([line for line in err.splitlines() if line.startswith("polytoken: error: ")]) == 1


def test_fingerprints_are_of_little_endian_float32_and_make_half_precision_exact() -> None:
    values = np.array([[1.5, -2.25], [0.0, 3.0]], "<f4")
    expected = {"shape": [2, 2], "sha256": hashlib.sha256(values.tobytes()).hexdigest()}
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        assert fingerprints(x=mx.array(values).astype(dtype), y=None) == {"x": expected, "y": None}
    assert fingerprints(x=mx.array(values.T.copy()).T)["x"] == expected  # layout in memory says nothing
    with pytest.raises(NonFiniteError, match="x: 1 of 4"):
        fetch({"x": mx.array([[1.0, float("inf")], [0.0, 0.0]])})


def test_a_receipt_holds_the_device_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: calls.append(arrays) or evaluate(*arrays))
    fingerprints(a=mx.ones((2,)), b=mx.zeros((3,)), c=None, d=mx.ones((2, 2)))
    assert len(calls) == 1


def test_rows_are_described_with_ties_to_the_lowest_id() -> None:
    about = describe_rows(np.array([[0.0, 2.0, 2.0, -1.0]], "<f4"), top=3)
    assert about["argmax"] == [1] and about["top"] == [[[1, 2.0], [2, 2.0], [0, 0.0]]]
    assert about["logsumexp"][0] == pytest.approx(np.log(1 + 2 * np.e**2 + np.e**-1))


def test_server_defaults_are_told_in_every_mode(run: Run, dense: str) -> None:
    for mode in ("forward", "ar"):
        overrides = run(dense, mode=mode, server_defaults=True).one("reference_environment")["overrides"]
        assert set(overrides) == {"settings", "sampling"}


@pytest.mark.parametrize(("interrupt", "status"), [(KeyboardInterrupt(), 130), (Terminated(), 143)])
def test_a_run_that_a_signal_ends_says_so_in_its_last_receipt(interrupt: KeyboardInterrupt, status: int) -> None:
    written: list[dict[str, Any]] = []
    receipts = Receipts(lambda line: written.append(json.loads(line)), lambda line: None)
    with pytest.raises(KeyboardInterrupt), receipts.ended():
        raise interrupt
    assert [record["event"] for record in written] == ["receipt_end"]
    assert written[0]["exit_status"] == status and written[0]["failure"]["code"] == "interrupted"


def test_a_mode_that_does_not_fit_the_checkpoint_is_named_with_one_that_does(run: Run, dense: str, canvas: str) -> None:
    for model, mode, named, fit in (
        (dense, "mtp", "--mtp", "--ar and --decode run it"),
        (canvas, "mtp-generate", "--mtp-generate", "--canvas runs it"),
        (canvas, "forward", None, "--canvas runs it"),
        (dense, "canvas", "--canvas", "--ar and --decode run it"),
    ):
        error = run(model, mode=mode, check=False).error
        assert isinstance(error, UsageError) and error.field == named
        assert str(error).endswith(fit) and "--lane" not in str(error) and "--drafter" not in str(error)


class Signalled(Receipts):
    """A signal comes with the first token, and the second token only when the run has been told to stop."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []
        self.noted: list[str] = []
        self.told = threading.Event()
        super().__init__(lambda line: self.written.append(json.loads(line)), self._take)

    def _take(self, line: str) -> None:
        self.noted.append(json.loads(line)["event"])
        if self.noted[-1] == "ar_token":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert self.told.wait(60)

    def stop(self) -> None:
        super().stop()
        self.told.set()


def test_a_signal_ends_a_run_at_the_next_token_and_not_at_the_last(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path, "qwen3", seed=1).path)
    receipts = Signalled()
    with pytest.raises(KeyboardInterrupt):
        run_oracle(Plan(mode="ar", temperature=0.0, max_new_tokens=20), EngineOptions(model=model), receipts)
    assert [record["event"] for record in receipts.written[-2:]] == ["ar_prefill_reference", "receipt_end"]
    assert receipts.written[-1]["exit_status"] == 130
    assert receipts.noted.count("ar_token") == 1 and receipts.noted[-1] == "reference_canary_summary"
