"""records/stats.py: known answers, the promised error rates by simulation, and every refusal and
warning."""

import hashlib
import json
import os
import re
import types
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

RECORDS = Path(__file__).resolve().parent.parent / "records"
sys.path.insert(0, str(RECORDS))
import stats  # noqa: E402
import verify  # noqa: E402

# The known answers: a record's ten runs, and four runs of the version before it
LOSSES = [3.2775, 3.2776, 3.2777, 3.2780, 3.2781, 3.2775, 3.2786, 3.2774, 3.2751, 3.2739]
TIMES = [140.909, 140.872, 140.743, 140.743, 140.747, 140.809, 140.728, 140.784, 140.862, 140.934]
TIMES_BEFORE = [141.654, 141.413, 141.467, 141.516]


def log(loss, seconds, source="new", gpus=8, steps=20, start=None, clock_reset=None):
    """Return a log in this project's or the community's form. clock_reset: a step at which its
    clock is reset."""
    lines = [] if start is None else [json.dumps({"run_id": f"{seconds}", **start})]
    for step in range(1, steps + 1):
        late = seconds * 1000 * (step / steps) - (
            0 if clock_reset is None or step < clock_reset else seconds * 400
        )
        lines.append(f"step:{step}/{steps} train_time:{round(late)}ms step_avg:1.00ms")
        if step % 5 == 0 and step < steps:
            lines.append(
                f"step:{step}/{steps} val_loss:{9 - 5 * step / steps + loss / 99:.4f} "
                f"train_time:{round(late) + 1}ms step_avg:1.00ms"
            )
    lines.append(
        f"step:{steps}/{steps} val_loss:{loss:.4f} train_time:{round(seconds * 1000)}ms"
        " step_avg:1.00ms"
    )
    if start is not None:
        lines.append(json.dumps({"end": {"final_val_loss": loss}}))
    table = "\n".join(
        f"|   {i}  NVIDIA H100 80GB HBM3    On  |   00000000:6{i}:00.0 Off |   0 |"
        for i in range(gpus)
    )
    bar = "=" * 100
    return f"source = {source!r}\n{bar}\n{table}\n{bar}\n" + "\n".join(lines) + "\n"


@pytest.fixture
def write(tmp_path):
    """Write a folder of logs -> its path."""

    def write(folder, contents):
        (tmp_path / folder).mkdir(exist_ok=True)
        for content in contents:
            (tmp_path / folder / f"{len(list((tmp_path / folder).iterdir()))}.txt").write_text(
                content
            )
        return str(tmp_path / folder)

    return write


@pytest.fixture
def new(write):
    return write("new", map(log, LOSSES, TIMES))


@pytest.fixture
def old(write):
    return write(
        "old", (log(3.278 + i / 2000, seconds, "old") for i, seconds in enumerate(TIMES_BEFORE))
    )


@pytest.fixture
def judge(capsys):
    """Run the command in this process -> (exit status, stdout, stderr)."""

    def judge(*arguments):
        status = stats.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return judge


@pytest.fixture
def refusal(judge):
    """Require that the input cannot be judged -> the message, one line."""

    def refusal(*arguments):
        status, out, err = judge(*arguments)
        assert (
            status == 2
            and err.count("\n") == 1
            and "Traceback" not in out
            and "The claim" not in out
        )
        return err

    return refusal


# Known answers


def test_the_loss_verdict_of_the_known_runs(new, judge):
    status, out, _ = judge(new, "--json")
    report = json.loads(out)
    loss = report["claim"]["loss"]
    time = report["claim"]["time"]
    assert (
        status == report["status"] == 0
        and report["verdict"] == "claim holds"
        and out.count("\n") == 1
    )
    assert (
        report["sides"]
        == [
            {
                "name": "the set",
                "role": "base",
                "n": 10,
                "loss": {"mean": loss["mean"], "sd": loss["sd"]},
                "bits_per_byte": None,
                "seconds": {"mean": time["mean"], "sd": time["sd"]},
            }
        ]
        and report["folder"] == new
    )
    assert loss["n"] == 10 and loss["mean"] == pytest.approx(3.27714, abs=1e-9)
    assert loss["sd"] == pytest.approx(0.0014645, abs=5e-8) and (loss["min"], loss["max"]) == (
        3.2739,
        3.2786,
    )
    assert loss["p"] == pytest.approx(8.182e-5, abs=5e-9) and loss["target"] == 3.28
    assert time["mean"] == pytest.approx(140.8131, abs=5e-5) and time["sd"] == pytest.approx(
        0.0760, abs=5e-5
    )


def test_the_comparison_of_the_known_runs(new, old, judge):
    status, out, _ = judge(new, "--vs", old, "--json")
    report = json.loads(out)
    compared = report["claim"]["comparison"]
    shown = report["verdict"], report["best"], report["folder"]
    assert status == 0 and shown == ("claim holds", None, None)
    assert compared["other"]["mean"] == pytest.approx(141.5125)
    assert compared["other"]["sd"] == pytest.approx(0.1033, abs=5e-5)
    assert compared["t"] == pytest.approx(-12.2785, abs=5e-5) and compared["df"] == pytest.approx(
        4.372, abs=5e-4
    )
    assert compared["p_two_sided"] == pytest.approx(1.490e-4, abs=5e-8)
    assert compared["difference"] == pytest.approx(-0.6994)
    (verdict,) = report["ideas"]
    wanted = scipy.stats.ttest_ind(np.log(TIMES), np.log(TIMES_BEFORE), equal_var=False)
    assert compared["p_two_sided"] == 2 * compared["p"]
    assert verdict["time"]["ratio"] == pytest.approx(
        scipy.stats.gmean(TIMES) / scipy.stats.gmean(TIMES_BEFORE)
    )
    assert (verdict["time"]["low"], verdict["time"]["high"]) == pytest.approx(
        np.exp(wanted.confidence_interval(0.95))
    )
    assert report["reason"] == report["claim"]["reason"]


@pytest.mark.parametrize("margin, n", [(0.002, 9), (0.0005, 91)])
def test_the_plan_of_a_loss(margin, n):
    assert stats.runs_needed(0.0013, margin, 0.01, 0.9) == n
    assert stats.power(n, 0.0013, margin, 0.01) >= 0.9 > stats.power(n - 1, 0.0013, margin, 0.01)


@pytest.mark.parametrize("margin, n", [(0.2, 6), (0.1, 15)])
def test_the_plan_of_a_time(margin, n):
    """For 0.2 s five runs a side have power 0.892 by Welch's test, which decides (the pooled test
    has 0.917)."""
    assert stats.runs_needed(0.07, margin, 0.01, 0.9, sets=2) == n
    assert stats.power(5, 0.07, 0.2, 0.01, sets=2) == pytest.approx(0.892, abs=5e-4)


# What the verdicts promise, by simulation

TRIALS = 10_000


def within(rate, expected):
    """Return whether a rate over TRIALS is within four standard errors of the expected one."""
    return abs(rate - expected) < 4 * (expected * (1 - expected) / TRIALS) ** 0.5


@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_a_wrong_claim_passes_with_probability_alpha(alpha):
    draw = np.random.default_rng(1)
    losses = draw.normal(3.28, 0.0013, (TRIALS, 9))
    assert within(np.mean(stats.one_sample_t_less(losses, 3.28).pvalue < alpha), alpha)
    times, others = draw.normal(140, 0.07, (2, TRIALS, 10))
    assert within(np.mean(stats.welch_t_less(times, others).pvalue < alpha), alpha)
    assert within(np.mean(stats.paired_t_less(times, others).pvalue < alpha), alpha)


def test_interleaved_runs_that_share_the_machines_drift_are_told_apart_by_the_paired_test():
    draw = np.random.default_rng(2)
    drift = draw.normal(140, 1.0, (TRIALS, 10))
    times = drift + draw.normal(0, 0.07, (TRIALS, 10))
    others = drift + draw.normal(0.2, 0.07, (TRIALS, 10))
    assert np.mean(stats.paired_t_less(times, others).pvalue < 0.01) > 0.99
    assert np.mean(stats.welch_t_less(times, others).pvalue < 0.01) < 0.05


def test_a_planned_claim_against_a_target_is_found_as_often_as_promised():
    margin = 0.0015
    n = stats.runs_needed(0.0013, margin, 0.01, 0.9)
    losses = np.random.default_rng(3).normal(3.28 - margin, 0.0013, (TRIALS, n))
    found = np.mean(stats.one_sample_t_less(losses, 3.28).pvalue < 0.01)
    assert within(found, stats.power(n, 0.0013, margin, 0.01)) and found > 0.89


@pytest.mark.parametrize(
    "n, margin",
    [
        (2, 0.6),
        (15, 0.1),
    ],
)
def test_a_planned_comparison_is_found_as_often_as_promised(n, margin):
    draw = np.random.default_rng(4)
    times = draw.normal(140 - margin, 0.07, (TRIALS, n))
    others = draw.normal(140, 0.07, (TRIALS, n))
    found = np.mean(stats.welch_t_less(times, others).pvalue < 0.01)
    assert within(found, stats.power(n, 0.07, margin, 0.01, sets=2))


# Looks that keep alpha


def looked_at(values, most, alpha=0.01):
    """Apply evaluate_looks to many sets at once -> (claims found, runs taken). values: [sets,
    most], or two of them"""
    looks = np.arange(2, most + 1)
    limits = stats.bounds(most, alpha)
    tests = [
        (
            stats.welch_t_less(*(side[:, :n] for side in values))
            if len(values) == 2
            else stats.one_sample_t_less(values[:, :n], 0)
        )
        for n in looks
    ]
    claims = np.array([test.pvalue < limit for test, limit in zip(tests, limits)]).T
    chances = np.array(
        [stats.predictive_power(test, n, most, limits[-1]) for test, n in zip(tests, looks)]
    ).T
    over = claims | (chances < stats.FUTILE)
    over[:, -1] = True
    last = over.argmax(1)
    return claims[np.arange(len(claims)), last], looks[last], claims.any(1)


@pytest.mark.parametrize("most, alpha", [(2, 0.05), (20, 0.01)])
def test_looking_after_every_run_passes_a_wrong_claim_with_probability_alpha(most, alpha):
    runs = np.random.default_rng(8).normal(0, 0.7, (TRIALS, most))
    claims, _, without_futility = looked_at(runs, most, alpha)
    assert within(np.mean(without_futility), alpha)  # exact: ended by the claim alone
    assert np.mean(claims) <= np.mean(without_futility)
    if most == 20:  # what the bounds are there for
        naive = [
            stats.one_sample_t_less(runs[:, :n], 0).pvalue < alpha for n in range(2, most + 1, 3)
        ]
        assert np.mean(np.any(naive, 0)) > 3 * alpha


def test_looks_by_welchs_test_keep_alpha_too():
    draw = np.random.default_rng(9)
    sides = np.stack([draw.normal(0, sd, (TRIALS, 8)) for sd in (1, 4)])
    found = np.mean(looked_at(sides, 8)[2])
    assert found < 0.01 + 4 * (0.01 * 0.99 / TRIALS) ** 0.5


def test_a_race_until_decided_has_the_plans_power_with_fewer_runs():
    """Expected runs: 86 to 97 % of the fixed plan's with the planned margin, half without any."""
    n = 6
    margin = next(
        margin for margin in np.arange(0.5, 3, 0.01) if stats.power(n, 1, margin, 0.01) >= 0.9
    )
    most = int(np.ceil(stats.LONGER * n))
    draw = np.random.default_rng(10)
    claims, taken, _ = looked_at(draw.normal(-margin, 1, (TRIALS, most)), most)
    assert np.mean(claims) > 0.9 and np.mean(taken) < 0.98 * n
    claims, taken, _ = looked_at(draw.normal(-2 * margin, 1, (TRIALS, most)), most)
    assert np.mean(claims) > 0.999 and np.mean(taken) < 0.82 * n
    assert np.mean(looked_at(draw.normal(0, 1, (TRIALS, most)), most)[1]) < 0.65 * n


def test_following_a_race_is_looking_at_it_so():
    runs = np.random.default_rng(11).normal(-0.8, 1, (50, 7))
    claims, taken, _ = looked_at(runs, 7)
    for values, claim, n in zip(runs, claims, taken):
        stop = stats.evaluate_looks(
            [lambda look: stats.one_sample_t_less(values[:look], 0)], 7, 7, 0.01
        )
        assert (stop["n"], stop["outcome"] == "the claim") == (n, claim)
        assert (
            stats.evaluate_looks(
                [lambda look: stats.one_sample_t_less(values[:look], 0)], n - 1, 7, 0.01
            )
            is None
        )
    assert 5 < claims.sum() < 45


def test_two_claims_must_both_be_found_and_may_be_at_different_looks():
    def at(n, p):
        return lambda look: type(
            "Found", (), {"pvalue": p if look >= n else 0.2, "statistic": -1.0}
        )

    assert stats.evaluate_looks([at(3, 1e-9), at(5, 1e-9)], 8, 8, 0.01)["passed"] == [3, 5]
    stop = stats.evaluate_looks([at(3, 1e-9), at(9, 0)], 8, 8, 0.01)
    assert stop["passed"] == [3, None] and stop["outcome"] == "futility"


# Losses that are skewed


def test_a_right_skew_makes_the_t_test_lenient_and_the_bootstrap_less_so():
    draw = np.random.default_rng(12)
    sets = 3000
    losses = draw.exponential(1, (sets, 10))
    wrong = stats.one_sample_t_less(losses, 1).pvalue < 0.01
    assert 0.045 < np.mean(wrong) < 0.075
    # the bootstrap passes what the t-test passes, or less
    beside = [stats.bootstrap_t_less(each, 1) < 0.01 for each in losses[wrong]]
    assert np.mean(beside) * np.mean(wrong) < 0.6 * np.mean(wrong)


def test_intervals_end_where_the_one_sided_test_decides(no_plans):
    """The upper end of the loss's interval is below the target exactly if p < alpha; the same for
    times."""
    draw = np.random.default_rng(5)
    for shift in draw.uniform(-0.003, 0.003, 100):
        losses = draw.normal(3.28 + shift, 0.0013, 8)
        found = stats.judge_loss(losses, 3.28, 0.01)
        assert (found["interval"][1] < 3.28) == (found["p"] < 0.01)
        sides = [
            types.SimpleNamespace(seconds=seconds, declared={})
            for seconds in (140 + losses, 143.28 + draw.normal(0, 0.0013, 5))
        ]
        time = stats.contrast_times(*(side.seconds for side in sides), False, None)
        found = stats.compare_times(sides, types.SimpleNamespace(time=time, paired=False), 0.01)
        assert (found["interval"][1] < 0) == (found["p"] < 0.01)


# Verdicts on a side and its base, by simulation


@pytest.fixture
def no_plans(monkeypatch):
    monkeypatch.setattr(stats, "runs_needed", lambda *_: 9)  # it takes most of the time


@pytest.mark.slow
@pytest.mark.parametrize(
    "n, paired, skewed",
    [(3, True, False), (5, True, True), (10, True, False), (3, False, False), (10, False, True)],
)
def test_intervals_cover_the_true_difference_and_p_has_its_size(n, paired, skewed, no_plans):
    """Pairs share a seed's luck, ten times their own spread. Skewed: exponential losses, whose
    differences have no skew."""
    draw = np.random.default_rng(21)
    trials = 2000
    noise = (draw.exponential if skewed else draw.normal)(size=(trials, 2, n))
    shared = 10 * draw.normal(size=(trials, 1, n)) * paired
    ours, base = np.moveaxis(noise + shared, 1, 0)
    found = [stats.contrast(a - 0.7, b, paired) for a, b in zip(ours, base)]
    covered = np.mean([one.low < -0.7 < one.high for one in found])
    false = np.mean(
        [stats.contrast(a, b, paired).p < stats.LEVEL for a, b in zip(ours[:1000], base)]
    )
    # within 3 standard errors of 95 and 5 %; fewer false claims where samples are few and Welch's
    # df cautious, or skewed
    cautious = skewed or not paired
    assert (
        0.935 < covered < (0.985 if cautious else 0.965)
        and (0.01 if cautious else 0.03) < false < 0.071
    )


def test_the_correction_keeps_the_level_over_all_ideas(no_plans):
    """Five ideas that change nothing share a base: at most 5 % of such ladders show one."""
    draw = np.random.default_rng(22)
    shown = []
    for _ in range(250):
        losses = draw.normal(size=(6, 5)) + draw.normal(size=5)
        p = [stats.contrast(idea, losses[5], True).p for idea in losses[:5]]
        shown.append([min(p) < 0.05, min(stats.holm(p)) < 0.05])
    alone, corrected = np.mean(shown, axis=0)
    assert alone > 0.12 and 0.015 < corrected < 0.071


# Races: n declared before the first run


def raced(n, sides="a", declared=None, race_id="r", shift=0.0, skip=(), drift=0.0, seed=0):
    """Return the logs of a race with n runs a side and seeds seed + i.

    Side b is slower by shift; the machine slows by drift from run to run."""
    draw = np.random.default_rng(7)
    contents = []
    for i in range(1, n + 1):
        for side in sides:
            seconds = round(
                140 + drift * i + draw.normal(0, 0.07) + (shift if side == "b" else 0), 3
            )
            race = {"race_id": race_id, "run": i, "declared_n": declared or n, "side": side}
            content = log(
                round(draw.normal(3.277, 0.001), 4),
                seconds,
                side,
                start={"race": race, "seed": seed + i},
            )
            if (i, side) not in skip:
                contents.append(content)
    return contents


def declare(folder, **words):
    """Write a race.jsonl beside the logs of raced()."""
    race = {
        "id": "r",
        "sides": {side: {"revision": None, "flags": []} for side in "ab"},
        "ranks": 8,
        "n": 10,
        "seed": 0,
        "alpha": 0.01,
        "test": "paired",
        **words,
    }
    (Path(folder) / "race.jsonl").write_text(json.dumps({"race": race}) + "\n")
    return folder


def test_the_test_that_was_declared_decides(write, judge, refusal):
    """On a drifting machine the paired test of log time finds the gain and Welch's does not; the
    declared one decides.

    The p of the claim, by hand, is one-sided, that of the table two-sided, of the same test."""
    folder = write("race", raced(10, "ab", shift=0.2, drift=1.0))
    runs = json.loads(judge(folder, "--side", "a", "--json")[1])["runs"]
    ours, theirs = (
        np.array([run["train_time_ms"] for run in runs if run["set"] == f"side {side}"])
        for side in "ab"
    )
    for test, wanted, status in (
        (None, scipy.stats.ttest_ind(ours, theirs, equal_var=False, alternative="less"), 1),
        (
            "unpaired",
            scipy.stats.ttest_ind(
                np.log(ours), np.log(theirs), equal_var=False, alternative="less"
            ),
            1,
        ),
        ("paired", scipy.stats.ttest_rel(np.log(ours), np.log(theirs), alternative="less"), 0),
    ):
        if test:
            declare(folder, test=test)
        for side, tail in (("a", wanted.pvalue), ("b", 1 - wanted.pvalue)):
            report = json.loads(judge(folder, "--side", side, "--json")[1])
            compared = report["claim"]["comparison"]
            (verdict,) = report["ideas"]
            assert compared["p"] == pytest.approx(tail)
            assert verdict["time"]["low"] < verdict["time"]["ratio"] < verdict["time"]["high"]
            assert abs(compared["t"]) == pytest.approx(abs(wanted.statistic))
            assert ("interval" in compared) == (test is None)
        assert judge(folder, "--side", "a")[0] == status
    out = judge(folder, "--side", "a")[1]
    assert (
        "faster by the paired test of log time (p = " in out
        and "Welch" not in out
        and "less than that of" not in out
    )
    assert judge(declare(folder, id="another"), "--side", "a")[0] == 1  # says nothing of this race
    (Path(folder) / "race.jsonl").write_text('{"race": ' + "[" * 100_000)
    assert judge(folder, "--side", "a")[0] == 2
    (Path(folder) / "race.jsonl").write_text('{"race": ' + "[" * 100_000 + "\n")
    assert "race.jsonl: line 1 is no line of a race" in refusal(folder, "--side", "a")


# Races that run until they are decided


def until_decided(write, n, most=12, shift=0.2, **words):
    return declare(
        write(f"{n}{shift}", raced(n, "ab", declared=most, shift=shift)),
        n=most,
        until_decided=True,
        **words,
    )


def test_a_race_until_decided_is_judged_by_its_bounds(write, judge, refusal):
    early = refusal(until_decided(write, 3), "--side", "a")
    assert "after 3 of at most 12 runs it is not; resume it with race.py --resume" in early
    n = next(n for n in range(4, 13) if judge(until_decided(write, n), "--side", "a")[0] != 2)
    status, out, _ = judge(folder := until_decided(write, n), "--side", "a", "--json")
    stop = json.loads(out)["claim"]["stop"]
    assert status == 0 and 4 < n < 10 and stop["n"] == n and stop["outcome"] == "the claim"
    assert stop["bound"] == stats.bounds(12, 0.01)[n - 2] < 0.01
    status, out, _ = judge(folder, "--side", "a")
    assert (
        f"decided for the claim after {n} of at most 12 runs, at alpha 0.01 over all looks" in out
    )
    assert (
        f"Looks: decided for the claim after {n} of at most 12 runs, where p had to be below 0.00"
        in out
    )
    further = until_decided(write, n + 1)
    assert (
        f"the race was decided after {n} runs and continued to {n + 1}; the decision stands"
        in judge(further, "--side", "a")[1]
    )
    assert "declared to run until it is decided at alpha 0.01, not 0.05" in refusal(
        folder, "--side", "a", "--alpha", 0.05
    )
    for path in Path(folder).glob("*.txt"):
        if '"run": 2, "declared_n": 12, "side": "b"' in path.read_text():
            path.unlink()
    assert f"12 runs were declared and {n - 1} can be used" in refusal(folder, "--side", "a")


def test_what_is_below_alpha_but_not_below_the_bound_does_not_hold(write, judge):
    runs = json.loads(
        judge(declare(write("level", raced(4, "ab")), n=4), "--side", "a", "--json")[1]
    )["runs"]
    ours, theirs = (
        np.array([run["train_time_ms"] for run in runs if run["set"] == f"side {side}"])
        for side in "ab"
    )
    shift = next(
        shift
        for shift in np.arange(0, 2, 0.001)
        if stats.bounds(4, 0.01)[-1]
        < stats.paired_t_less(np.log(ours), np.log(theirs + 1000 * shift)).pvalue
        < 0.01
    )
    status, out, _ = judge(until_decided(write, 4, 4, round(shift, 3)), "--side", "a", "--json")
    report = json.loads(out)
    assert (
        report["claim"]["stop"]["bound"] < report["claim"]["comparison"]["p"] < 0.01 and status == 1
    )
    assert (
        report["claim"]["stop"]["outcome"] == "the last look"
        and not report["claim"]["comparison"]["significant"]
    )


@pytest.mark.parametrize("test", ["paired", "unpaired"])
def test_a_race_until_decided_ends_for_want_of_a_chance(write, judge, test):
    n = next(
        n
        for n in range(2, 13)
        if judge(until_decided(write, n, shift=-0.05, test=test), "--side", "a")[0] != 2
    )
    status, out, _ = judge(until_decided(write, n, shift=-0.05, test=test), "--side", "a")
    assert (
        status == 1
        and n < 8
        and f"not significantly faster{' by the paired test of log time' * (test == 'paired')}"
        in out
    )
    assert f"decided for futility after {n} of at most 12 runs" in out


def test_pairs_are_looked_at_in_the_order_of_their_runs(write, judge):
    """Runs 10 to 12 come after run 9, so that they do not change what was decided before."""
    decided = json.loads(judge(until_decided(write, 12), "--side", "a", "--json")[1])["claim"][
        "stop"
    ]
    contents = raced(12, "ab", declared=12, shift=0.2)
    slow = [
        (
            re.sub(r"train_time:(\d+)", lambda ms: f"train_time:{2 * int(ms[1])}", content)
            if re.search('"run": 1[012].*"side": "a"', content)
            else content
        )
        for content in contents
    ]
    assert slow != contents and decided["n"] < 10
    folder = declare(write("slow", slow), n=12, until_decided=True)
    assert json.loads(judge(folder, "--side", "a", "--json")[1])["claim"]["stop"] == decided


def test_a_race_until_decided_is_not_decided_by_skewed_losses_alone(write, judge, refusal):
    """The t-test passes these losses, and the bootstrap-t, which allows for the skew, does not."""
    losses = np.round(3.28 - 0.001 * np.array([0.2, 0.95, 0.9, 0.97, 0.93, 0.96]), 6)
    assert stats.one_sample_t_less(losses, 3.28).pvalue < stats.bounds(6, 0.01)[-1]
    contents = [
        re.sub("val_loss(:|.: )3.27.*?(?=[ }])", rf"val_loss\g<1>{losses[i]:.6f}", content)
        for i, content in enumerate(raced(6, declared=6))
    ]
    race = declare(
        write("skewed", contents),
        until_decided=True,
        n=6,
        sides={"": {"revision": None, "flags": []}},
    )
    status, out, _ = judge(race, "--json")
    report = json.loads(out)
    assert (
        report["claim"]["loss"]["p"] < report["claim"]["stop"]["bound"]
        and stats.bootstrap_t_less(losses, 3.28) > 0.01
    )
    assert (
        status == 1
        and not report["claim"]["loss"]["significant"]
        and report["claim"]["stop"]["outcome"] == "the last look"
    )


def test_equal_losses_decide_no_race(write, refusal):
    """Two losses with four decimals are equal and below the target in 1 % of races without a gain;
    their t-test has p = 0."""
    losses = [3.2795, 3.2795, 3.2801]
    contents = [
        re.sub("val_loss(:|.: )3.27.*?(?=[ }])", rf"val_loss\g<1>{loss:.4f}", content)
        for loss, content in zip(losses, raced(3, declared=7))
    ]
    assert stats.one_sample_t_less(losses[:2], 3.28).pvalue == 0
    race = declare(
        write("equal", contents),
        until_decided=True,
        n=7,
        sides={"": {"revision": None, "flags": []}},
    )
    assert "after 3 of at most 7 runs it is not" in refusal(race)


def test_a_race_of_one_version_until_decided(write, judge, refusal):
    def race(n):
        return declare(
            write(f"one{n}", raced(n, declared=10)),
            until_decided=True,
            sides={"": {"revision": None, "flags": []}},
        )

    n = next(n for n in range(2, 10) if judge(race(n))[0] != 2)
    assert 3 < n < 9 and judge(race(n))[0] == 0 and "after 2 of at most 10 runs" in refusal(race(2))


# The command


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x", "--alpha", "2"],
        ["x", "--target", "nan"],
        ["x", "--side", "a", "--vs", "y"],
        ["--plan", "--power", "1"],
        ["x", "--alp", "0.1"],
        ["x", "--sd", "1"],
        ["x", "--margin", "1"],
        *(
            ["--plan", "--sd", "1", "--margin", "1", *more]
            for more in (["x"], ["--vs", "x"], ["--side", "a"])
        ),
    ],
)
def test_flags_that_make_no_sense(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        stats.main(arguments)
    assert left.value.code == 2 and "Traceback" not in capsys.readouterr().err


def draw(path, *words):
    """Plot what words name for stats.py."""
    sides = stats.choose_sides(stats.parse(list(map(str, words))))
    *ideas, base = sides
    stats.plot(sides, stats.verdicts([(idea, base) for idea in ideas]), path)


def test_the_plot(new, old, tmp_path):
    pytest.importorskip("matplotlib")
    os.rename(old, old := str(tmp_path / os.fsdecode(b"\xff")))  # no font has it
    path = tmp_path / "x.png"
    draw(path, new, "--vs", old)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


def test_a_short_run_alone_is_drawn_with_its_training_losses(write, monkeypatch, tmp_path):
    figures = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: figures.append(self))
    lines = [
        f"step:{i}/20 train_time:{i}ms step_avg:1.00ms train_loss:{5 - i / 10:.4f}"
        for i in range(1, 21)
    ]
    one = write(
        "one",
        [
            "\n".join(
                [
                    "x",
                    "=" * 100,
                    *lines,
                    "step:20/20 val_loss:3.2000 train_time:20ms step_avg:1.00ms",
                    "",
                ]
            )
        ],
    )
    draw(tmp_path / "x.png", one)
    trained, validated = figures[0].axes[1].lines[:2]
    assert trained.get_label() == "the set, n = 1" and trained.get_ydata() == pytest.approx(
        [5 - i / 10 for i in range(1, 21)]
    )
    assert list(validated.get_xydata()[0]) == [0.02, 3.2] and validated.get_marker() == "o"
    draw(tmp_path / "y.png", write("race", raced(3, "ab")), "--side", "a")
    styles = [
        line.get_linestyle()
        for line in figures[1].axes[-1].lines
        if "n = 3" in str(line.get_label())
    ]
    assert styles == ["-", "--"], "the base lies dashed over the other side"
    aimless = [
        log(3.2 + seed / 99, 9.0 + seed, start={"seed": seed, "target_val_loss": 0})
        for seed in range(3)
    ]
    draw(tmp_path / "z.png", write("aimless", aimless))
    labels = [
        any("target" in str(line.get_label()) for line in found.axes[0].lines) for found in figures
    ]
    assert labels == [True, True, False]


def test_json_states_plans_and_sets_without_a_verdict(new, write, judge):
    found = json.loads(judge("--plan", "--json", "--sd", 0.0013, "--margin", 0.002)[1])
    assert [needed["runs"] for needed in found["needed"]] == [9, 13]
    one = write("one", [log(3.2775, 140.9), "no log\n"])
    no_target = write("no_target", NO_TARGET)
    status, out, _ = judge("--json", one)
    report = json.loads(out)
    assert (
        status == 2
        and report["verdict"]
        == json.loads(judge("--plan", "--json", "--sd", 1)[1])["verdict"]
        == "not judged"
    )
    assert report["runs"][0]["val_loss"] == 3.2775 and len(report["left_out"]) == 1
    report = json.loads(judge(no_target, "--side", "a", "--json")[1])
    assert report["claim"] is None and len(report["ideas"]) == 1


# What it prints: tests/golden/stats.txt


def ends_in(said):
    return (
        "race.jsonl",
        '{"race": {"id": "r", "n": 10, "seed": 0, "ranks": 8, "sides": {"": {"revision": null,'
        ' "flags": []}}, ' + said + "}}\n",
    )


def started(change=lambda i: {}, losses=LOSSES, times=TIMES, **same):
    """Return ten logs of our own form. change(i): what run i states in its first line; same: what
    all state."""
    return [
        log(loss, seconds, start={**same, **change(i)})
        for i, (loss, seconds) in enumerate(zip(losses, times))
    ]


def edited(contents, at, edit):
    return [edit(content) if i == at else content for i, content in enumerate(contents)]


def resumed(content):
    return content.replace("\nstep:11/", '\n{"resumed": {"from_step": 10}}\nstep:11/', 1)


NEW = [*map(log, LOSSES, TIMES)]
OLD = [log(3.278 + i / 2000, seconds, "old") for i, seconds in enumerate(TIMES_BEFORE)]
SKEWED = [3.2701, 3.2702, 3.2700, 3.2703, 3.2701, 3.2702, 3.2704, 3.2700, 3.2702, 3.2790]
LLM_C = [f"s:0 tel:10.9{i:03}\ns:9 tel:{loss:.4f}\n" for i, loss in enumerate(LOSSES)]
# 17 hashes, 16 first digits
SOURCES = [log(3.27 + i / 999, 140 + i / 9, f"source {i}") for i in range(17)]
FIRST = [hashlib.sha256(f"source = 'source {i}'\n".encode()).hexdigest()[0] for i in range(17)]
HASHES = {
    name: hashlib.sha256(f"source = {name!r}\n".encode()).hexdigest()[:8] for name in ("new", "old")
}
ONE_GPU = [log(loss, t, gpus=1) for loss, t in zip(LOSSES, TIMES)]
RACE = raced(10)
BOTH = raced(10, "ab", shift=0.2)
LADDER = raced(5, "ab", shift=0.2)
OTHER_RACE = [
    content.replace("train_time:1", "train_time:2") for content in raced(5, race_id="q", seed=5)
]
STEADY = {
    name: [log(3.27 + i / 999, seconds, name) for i in range(3)]
    for name, seconds in (("a", 140), ("b", 141), ("zero", 0))
}
LENGTHS = [
    "\n".join(
        [
            "import torch",
            "=" * 100,
            *(f"s:{step} tel:{5 - step / 1000:.4f}" for step in range(0, last + 1, 250)),
            "",
        ]
    )
    for last in (500, 250)
]
NO_TARGET = [content.replace('"seed"', '"target_val_loss": 0, "seed"') for content in LADDER]
SECOND_SEED = [content.replace('"seed": 2}', '"seed": 1}') for content in RACE]
RATES = [
    content.replace('"seed": 2}', f'"seed": 1, "config": {{"lr": {i}, "seed": 1}}}}')
    for i, content in enumerate(RACE)
]
LATE, EARLY = (
    [log(loss, t, clock_reset=step) for loss, t in zip(LOSSES, TIMES)] for step in (12, 2)
)
NAN = ("nan.txt", log(float("nan"), 140))
ZERO = ("x.txt", log(3.277, 0))
A, B = (
    started(
        lambda i: {"seed": i},
        LOSSES,
        [t + more for t in TIMES],
        target_val_loss=3.28,
        config={"val_tokens": 100},
    )
    for more in (0, 1)
)
CASES = [  # exit status, words of the command, logs of the folders a, b and c
    (0, "a", NEW),
    (0, "a --vs b", NEW, OLD),
    (1, "b --vs a", NEW, OLD),
    (2, "none --json"),
    (2, "a none/*.txt", NEW),
    (
        1,
        "a --vs b",
        [log(loss + 0.01, seconds, "bad") for loss, seconds in zip(LOSSES, TIMES)],
        OLD,
    ),
    (
        1,
        "a",
        [
            *map(
                log,
                [3.2754, 3.2781, 3.2805, 3.2781, 3.2779],
                [137.554, 137.514, 137.542, 137.635, 137.898],
            )
        ],
    ),
    (0, "a", [*map(log, SKEWED, TIMES)]),
    (0, "a", [*map(log, SKEWED[1:], TIMES[1:])]),
    (1, "a --target 3.2775", NEW),
    (1, "a --alpha 1e-5", NEW),
    (0, "a --target 3.3 --alpha 1e-5", NEW),
    (1, "a", started(target_val_loss=3.2)),
    (2, "a --target 3.28", started(target_val_loss=3.2)),
    (2, "a", started(lambda i: {"target_val_loss": 3.2 + i % 2 / 10})),
    *(
        (status, f"a{words}", started(target_val_loss=odd))
        for odd in ("x", True, float("nan"), float("-inf"), 10**400)
        for status, words in ((2, ""), (0, " --target 3.28"))
    ),
    (0, "a", LLM_C),
    (2, "a --vs b", LLM_C, OLD),
    # several sources, configs, cards or races in a set
    (2, "a b", NEW, OLD),
    (0, f"a b --source {HASHES['new']}", NEW, OLD),
    (2, "a --source 0000", NEW),
    (2, f"a --source {next(digit for digit in FIRST if FIRST.count(digit) > 1)}", SOURCES),
    (2, "a --vs b c", NEW, OLD, SOURCES[:3]),
    (0, f"a --vs b c --vs-source {HASHES['old']}", NEW, OLD, SOURCES[:3]),
    (
        0,
        "a",
        started(lambda i: {"config": {"lr": 0.1, "seed": i, "race_run": i, "run_id": str(i)}}),
    ),
    (2, "a", started(lambda i: {"config": {"lr": 0.1 * (1 + i % 2), "seed": i}})),
    (2, "a", edited(NEW, 3, lambda _: ONE_GPU[3])),
    (2, "a --vs b", ONE_GPU, OLD),
    (
        0,
        "a",
        [
            text.replace("H100 80GB HBM3 ", "H200           ") if i > 4 else text
            for i, text in enumerate(NEW)
        ],
    ),
    *(
        (status, f"{tool}a --vs b", A, [text.replace(*edit) for text in B])
        for edit in (
            ("H100 80GB HBM3 ", "A100-SXM4-80GB "),
            ("|   7  NVIDIA", "none"),
            ('"target_val_loss": 3.28', '"target_val_loss": 3.3'),
            ('"val_tokens": 100', '"val_tokens": 90'),
        )
        for tool, status in (("", 2), ("verify.py ", 1))
    ),
    (
        0,
        "a --vs b",
        A,
        [
            text.replace(
                "source = ", "Driver Version: 570.1\n" + "=" * 100 + "\nimport a\nsource = "
            )
            for text in B
        ],
    ),
    # runs that do not count, or speak against the claim
    (0, "a", [*NEW, ("copy.txt", NEW[0]), ("again.txt", NEW[0])]),
    (0, "a", [*NEW, ("cut.txt", log(3.27, 140)[:-400]), ("README.md", "Ten.")]),
    (2, "a/README.md", [("README.md", "Ten runs.")]),
    (2, "a", [*NEW, NAN]),
    (0, "a", [*NEW, ("nan.txt", log(float("nan"), 140, "other"))]),
    (2, "a --vs b", NEW, [*OLD, ("nan.txt", log(float("nan"), 140, "old"))]),
    (0, "a", [*NEW, ZERO]),
    (2, "a --vs b", [*NEW, ZERO], OLD),
    (
        0,
        "a",
        edited(
            started(
                lambda i: {
                    "seed": i,
                    **({"init_from": {"path": "x.pt", "sha256": "0"}} if i == 4 else {}),
                }
            ),
            3,
            resumed,
        ),
    ),
    (2, "a", edited(RACE, 6, resumed)),
    (0, "a", EARLY),
    (0, "a --vs b", EARLY, OLD),
    (0, "a", LATE),
    (2, "a --vs b", LATE, OLD),
    (2, "b --vs a", LATE, OLD),
    (2, "a", [log(3.2775, 140.9), "no log\n"]),
    (2, "a", ["hello"]),
    (2, "a", []),
    # too few, too equal, no set
    (2, "a --vs b", NEW, [log(3.2, 141, "other")]),
    (2, "a", [log(3.27, 140 + i / 7) for i in range(5)]),
    (2, "a --vs b", STEADY["a"], STEADY["b"]),
    (2, "a --vs b", STEADY["a"], STEADY["zero"]),
    (2, "a", LENGTHS),
    (2, "a", [log(LOSSES[i], TIMES[i], steps=20 + 5 * (i % 2)) for i in range(10)]),
    (2, "a --vs b", NEW, [NEW[0]]),
    (2, "a", [text.replace("|   0  ", "Using seed=7\n|   0  ", 1) for text in NEW]),
    # races
    (0, "a", RACE),
    (2, "a", RACE[:9]),
    (2, "a", [*RACE[:9], RACE[9][:-300]]),
    (2, "a", raced(10, declared=9)),
    (2, "a", [content.replace('"run": 4', '"run": 5') for content in RACE]),
    (2, "a", raced(5) + OTHER_RACE),
    (
        2,
        "a",
        edited(raced(5), 2, lambda text: re.sub("val_loss:3.27.*? ", "val_loss:3.2701 ", text)),
    ),
    (2, "a", SECOND_SEED),
    (2, "a", RATES),
    (0, "a", [*RACE, ends_in('"alpha": 0.02')]),
    (2, "a --alpha 0.4", [*RACE, ends_in('"alpha": 0.02')]),
    (0, "a", BOTH),
    (0, "a --side a", BOTH),
    (1, "a --side b", BOTH),
    (2, "a --side a", raced(10, "ab", shift=0.2, skip=[(4, "b")])),
    (2, "a --side c", BOTH),
    (0, "a --vs b", RACE, raced(10, "b", race_id="q", shift=0.2)),
    (0, "a --vs b", RACE, raced(4, "b", shift=0.2)),
    (2, "a --side a", NO_TARGET),
    (0, "a --side a --target 3.28", NO_TARGET),
    (1, "a --side b --target 3.28", NO_TARGET),
    (2, "a", [text for text in NO_TARGET if '"side": "a"' in text]),
    (2, "a --side a", raced(1, "a", shift=0.2)),
    # plans
    (0, "--plan --sd 0.0013 --margin 0.002"),
    (0, "--plan --sd 0.07 --margin 0.2"),
    (2, "--plan --sd 1"),
    (2, "--plan --sd 0.1 --margin -1"),
    (2, "--plan --sd 1 --margin 1e-9"),
]


def test_stats_of_sets_of_every_kind_prints_what_its_golden_file_holds(
    golden, tmp_path, monkeypatch, capsys
):
    """The sets of a case are the folders a, b and c."""
    shown = []
    wrong = []
    for number, (status, words, *sets) in enumerate(CASES):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        tool, *arguments = (
            words.split() if words.startswith("verify.py") else ["stats.py", *words.split()]
        )
        for name, contents in zip("abc", sets):
            os.mkdir(name)
            for i, content in enumerate(contents):
                file, content = (f"{i}.txt", content) if isinstance(content, str) else content
                Path(name, file).write_text(content)
        found = {"stats.py": stats, "verify.py": verify}[tool].main(arguments)
        said = capsys.readouterr()
        if found != status or "Traceback" in said.out + said.err or said.err.count("\n") > 1:
            wrong.append((number, words, found))
        shown.append(f"$ {tool} {' '.join(arguments)}\n{said.out}{said.err}exit status {found}\n")
    assert not wrong
    golden("stats", "\n".join(shown))
