"""How many drafts: fixed, by streaks, by measurement; and what the lane says when it stops drafting."""

from __future__ import annotations

import numpy as np
import pytest
from mtp_models import TableHead, TableModel
from mtp_runs import GREEDY, USUAL, ask, mtp_lane, run_all, start, step

from polytoken.lanes.mtp.cost import CostDepth, CostTable
from polytoken.lanes.mtp.depth import FixedDepth, StreakDepth


def test_fixed_is_fixed() -> None:
    policy = FixedDepth(3)
    policy.observe(3, 0, 1.0)
    assert policy.depth == 3 and policy.reason == ""


def test_a_streak_goes_up_after_four_and_down_after_an_early_rejection() -> None:
    policy = StreakDepth(3)
    for _ in range(3):
        policy.observe(1, 1, 0.1)
    assert policy.depth == 1
    policy.observe(1, 1, 0.1)
    assert policy.depth == 2
    for _ in range(4):
        policy.observe(2, 2, 0.1)
    assert policy.depth == 3
    for _ in range(8):
        policy.observe(3, 3, 0.1)
    assert policy.depth == 3  # the most
    policy.observe(3, 2, 0.1)  # late: the third of three
    assert policy.depth == 3
    policy.observe(3, 0, 0.1)
    assert policy.depth == 2
    policy.observe(1, 0, 0.1)  # cut by the request's end
    assert policy.depth == 2
    policy.observe(2, 0, 0.1)
    policy.observe(1, 0, 0.1)
    assert policy.depth == 1  # never none


def simulate(
    policy: CostDepth, *, windows: int, rates: list[float], seconds: list[float], rng: np.random.Generator
) -> list[int]:
    """The depths that a policy asks for, when draft j is right with chance rates[j] and a window costs seconds[d]."""
    asked = []
    for _ in range(windows):
        d = policy.depth
        asked.append(d)
        accepted = 0
        while accepted < d and rng.random() < rates[accepted]:
            accepted += 1
        policy.observe(d, accepted, seconds[d] * rng.uniform(0.95, 1.05))
    return asked


def best(rates: list[float], seconds: list[float]) -> int:
    scores = [(1.0 + sum(np.prod(rates[: j + 1]) for j in range(d))) / seconds[d] for d in range(len(seconds))]
    return int(np.argmax(scores))


@pytest.mark.parametrize(
    "rates, seconds",
    [
        ([0.95, 0.9, 0.9, 0.9], [0.010, 0.011, 0.012, 0.013, 0.014]),
        ([0.8, 0.3, 0.1, 0.1], [0.010, 0.012, 0.014, 0.016, 0.018]),
        ([0.2, 0.1, 0.1, 0.1], [0.010, 0.015, 0.020, 0.025, 0.030]),
        ([0.85, 0.85, 0.85, 0.85], [0.010, 0.019, 0.029, 0.039, 0.049]),  # right, and yet too dear
    ],
)
def test_cost_finds_the_fastest_depth_and_keeps_to_it(rates: list[float], seconds: list[float]) -> None:
    rng = np.random.default_rng(3)
    policy = CostDepth(CostTable(4))
    asked = simulate(policy, windows=600, rates=rates, seconds=seconds, rng=rng)
    assert set(asked[:10]) == {0, 1, 2, 3, 4}  # the warm-up visits every depth
    late = asked[200:]
    fastest = best(rates, seconds)
    assert late.count(fastest) > 0.75 * len(late)
    assert len(late) - late.count(fastest) >= 8  # rivals are tried again
    assert policy.depth != 0 or "plain decoding" in policy.reason or fastest != 0


def test_cost_comes_back_when_the_text_changes() -> None:
    """Acceptance is not stationary: off is never for ever, and neither is on."""
    rng, table = np.random.default_rng(4), CostTable(3)
    policy = CostDepth(table)
    seconds = [0.010, 0.013, 0.016, 0.019]
    hard, easy = [0.05] * 3, [0.97] * 3
    assert simulate(policy, windows=300, rates=hard, seconds=seconds, rng=rng)[-100:].count(0) > 70
    assert simulate(policy, windows=600, rates=easy, seconds=seconds, rng=rng)[-100:].count(3) > 70
    assert simulate(policy, windows=600, rates=hard, seconds=seconds, rng=rng)[-100:].count(0) > 70


def test_cost_shrugs_at_spikes_and_pauses() -> None:
    table = CostTable(1)
    for _ in range(3):
        table.time(1, 0.010)
    table.time(1, 0.030)
    assert table.seconds[1] == pytest.approx(0.010 + 0.02 * (1 - np.exp(-0.03 / 0.4)) / 4)
    before = table.seconds[1]
    table.time(1, 60.0)
    table.time(1, 0.0)
    assert table.seconds[1] == before
    assert table.seconds[0] is None


def test_a_second_row_starts_from_what_the_lane_knows() -> None:
    table = CostTable(2)
    simulate(CostDepth(table), windows=200, rates=[0.1, 0.1], seconds=[0.01, 0.02, 0.03], rng=np.random.default_rng(0))
    later = CostDepth(table)
    assert later.depth == 0 and "0." in later.reason


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def slow_lane(*, draft_seconds: float, good: bool, **settings: object):
    """A table network on which a verify forward takes 10 ms and a draft as long as it is told."""
    clock, rng = Clock(), np.random.default_rng(2)
    table = np.repeat(rng.normal(0, 3, (1, 12, 12)), 12, axis=0)  # the next id hangs on the last alone
    model, head = TableModel(table), TableHead(table[0] if good else -table[0])
    model.draft_head = head
    forward, draft = model.forward, head.draft

    def timed_forward(*args, **kwargs):
        clock.now += 0.010
        return forward(*args, **kwargs)

    def timed_draft(*args, **kwargs):
        clock.now += draft_seconds
        return draft(*args, **kwargs)

    model.forward, head.draft = timed_forward, timed_draft  # type: ignore[method-assign]
    return mtp_lane(model, depth=3, policy="cost", clock=clock, **settings)


@pytest.mark.parametrize("draft_seconds, good, fastest", [(0.001, True, 3), (0.001, False, 0), (0.030, True, 0)])
def test_d14_the_lane_stops_drafting_where_it_loses_and_says_so(draft_seconds: float, good: bool, fastest: int) -> None:
    lane = slow_lane(draft_seconds=draft_seconds, good=good)
    (run,) = run_all(lane, [ask("a", (1, 2), count=400)])
    depths = [cycle.requested_depth for cycle in run.row.cycles]
    late = depths[len(depths) // 2 :]
    assert late.count(fastest) > 0.7 * len(late)
    if fastest == 0:
        assert set(late) != {0}  # tried again
        says = start(lane, ask("b", (1, 2), count=9))
        step(lane, [says])
        step(lane, [says])
        assert says.detail["speculation"].startswith("off: depth")
        assert run.row.tally.drafted_tokens == sum(map(len, (cycle.drafts for cycle in run.row.cycles)))
    else:
        assert run.detail["speculation"] == "on"


@pytest.mark.parametrize("sampling", [GREEDY, USUAL], ids=["greedy", "sampled"])
def test_changing_depths_keep_history_and_text_whole(sampling) -> None:
    """Windows without drafts owe pairs, which the next draft appends; none is lost."""
    lane = slow_lane(draft_seconds=0.03, good=True)
    run = start(lane, ask("a", (1, 2), count=150, sampling=sampling))
    most = 0
    while not run.over:
        step(lane, [run])
        drafter = run.row.drafter
        assert drafter.history.offset + drafter.owed == run.row.state.offset - 1
        most = max(most, drafter.owed)
    assert 5 < most <= 64
    lane.finish(run.row)
    assert run.row.drafter.history.offset == run.row.state.offset - 1 == 2 + 150 - 1


def test_a_step_of_several_rows_is_shared_out_among_them() -> None:
    lane = slow_lane(draft_seconds=0.0, good=True)
    run_all(lane, [ask(str(n), (1, n), count=60) for n in range(3)])
    known = [seconds for seconds in lane._costs.seconds if seconds is not None]
    assert known and all(0.005 < seconds < 0.015 for seconds in known)


def test_d13_a_head_that_is_never_right_is_pointed_out() -> None:
    rng = np.random.default_rng(2)
    table = rng.normal(0, 3, (12, 12, 12))
    table[:, :, 11] = -50.0  # never said, and all that the head proposes
    wrong = TableModel(table, TableHead(np.eye(12)[[11] * 12]))
    lane = mtp_lane(wrong, depth=1)
    run_all(lane, [ask("a", (1, 2), count=200)])
    assert lane.statistics()["draft_warning"] is None  # too early to tell
    run_all(lane, [ask("b", (1, 2), count=100)])
    assert "first drafts were accepted" in lane.statistics()["draft_warning"]
    right = mtp_lane(TableModel(table, TableHead(table.mean(axis=0))), depth=1)
    run_all(right, [ask("a", (1, 2), count=300)])
    assert right.statistics()["draft_warning"] is None
