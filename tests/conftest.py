"""What every test may rely on: exact products behind MLX on the CPU, and the real small model where asked for."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import pytest

from polytoken.backend import enable_products, select_device
from polytoken.checkpoint.store import CheckpointStore, default_cache_root
from polytoken.errors import CheckpointError

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in a shell's background, this process ignores Ctrl-C, and so would every program it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = {
    "test_a_bank_of_any_size_changes_nothing_but_work[gemma3_text]",
    "test_a_full_queue_is_429_with_a_time_to_wait",
    "test_a_hanging_probe_ends_the_process_with_86_within_2200_ms_while_it_generates",
    "test_a_request_gets_the_same_alone_and_in_any_company[gemma3_text]",
    "test_a_resumed_chat_answers_as_one_that_went_on",
    "test_depths_beside_ar_and_the_peer[qwen3_next]",
    "test_j02_memory_is_flat_over_many_steps",
    "test_load_once_generate_often",
    "test_memory_is_flat_over_many_tokens[gemma3_text]",
    "test_other_ways_to_draft",
    "test_packed_weights_serve_alone_and_in_company[modilify-4]",
    "test_smollm2_is_of_one_law_with_mlx_lm",
    "test_smollm2_runs_the_modes_of_a_model_without_a_head",
    "test_survivors_say_what_they_say_alone_and_nothing_stays_open",
}
"""Tests that take many seconds, or need an idle machine: `pytest --slow` runs them too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take many seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.name in SLOW:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    chosen = select_device("auto")
    enable_products(chosen, "exact", threads=1)
    return chosen


@pytest.fixture(scope="module", autouse=True)
def settled_objects() -> None:
    """An engine that closes looks through every object for garbage; those of pytest and of the libraries stay out."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The pulled SmolLM2, in the user's own cache folder so that other tests and runs share it."""
    store = CheckpointStore(default_cache_root())
    try:
        return store.pull("smollm2-135m")
    except CheckpointError as fault:
        if fault.code == "no_network":
            pytest.skip(str(fault))
        raise
