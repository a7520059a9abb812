"""records/stats.py: known answers, the promised error rates by simulation, and every refusal and warning."""

import functools
import json
import os
import re
import types
import subprocess
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
    """Return a log in this project's or the community's form. clock_reset: a step at which its clock is reset."""
    lines = [] if start is None else [json.dumps({"run_id": f"{seconds}", **start})]
    for step in range(1, steps + 1):
        late = seconds * 1000 * (step / steps) - (0 if clock_reset is None or step < clock_reset else seconds * 400)
        lines.append(f"step:{step}/{steps} train_time:{round(late)}ms step_avg:1.00ms")
        if step % 5 == 0 and step < steps:
            lines.append(f"step:{step}/{steps} val_loss:{9 - 5 * step / steps + loss / 99:.4f} "
                         f"train_time:{round(late) + 1}ms step_avg:1.00ms")
    lines.append(f"step:{steps}/{steps} val_loss:{loss:.4f} train_time:{round(seconds * 1000)}ms step_avg:1.00ms")
    if start is not None:
        lines.append(json.dumps({"end": {"final_val_loss": loss}}))
    table = "\n".join(f"|   {i}  NVIDIA H100 80GB HBM3    On  |   00000000:6{i}:00.0 Off |   0 |" for i in range(gpus))
    bar = "=" * 100
    return f"source = {source!r}\n{bar}\n{table}\n{bar}\n" + "\n".join(lines) + "\n"


@pytest.fixture
def write(tmp_path):
    """Write a folder of logs -> its path."""
    def write(folder, contents):
        (tmp_path / folder).mkdir(exist_ok=True)
        for content in contents:
            (tmp_path / folder / f"{len(list((tmp_path / folder).iterdir()))}.txt").write_text(content)
        return str(tmp_path / folder)
    return write


@pytest.fixture
def new(write):
    return write("new", map(log, LOSSES, TIMES))


@pytest.fixture
def old(write):
    return write("old", (log(3.278 + i / 2000, seconds, "old") for i, seconds in enumerate(TIMES_BEFORE)))


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
        assert status == 2 and err.count("\n") == 1 and "Traceback" not in out and "The claim" not in out
        return err
    return refusal


# Known answers

def test_the_loss_verdict_of_the_known_runs(new, judge):
    status, out, _ = judge(new, "--json")
    report = json.loads(out)
    loss, time = report["loss"], report["time"]
    assert status == 0 and report["verdict"] == "the claim holds"
    assert loss["n"] == 10 and loss["mean"] == pytest.approx(3.27714, abs=1e-9)
    assert loss["sd"] == pytest.approx(0.0014645, abs=5e-8) and (loss["min"], loss["max"]) == (3.2739, 3.2786)
    assert loss["p"] == pytest.approx(8.182e-5, abs=5e-9) and loss["target"] == 3.28
    assert time["mean"] == pytest.approx(140.8131, abs=5e-5) and time["sd"] == pytest.approx(0.0760, abs=5e-5)


def test_the_comparison_of_the_known_runs(new, old, judge):
    status, out, _ = judge(new, "--vs", old, "--json")
    compared = json.loads(out)["comparison"]
    assert status == 0
    assert compared["other"]["mean"] == pytest.approx(141.5125)
    assert compared["other"]["sd"] == pytest.approx(0.1033, abs=5e-5)
    assert compared["t"] == pytest.approx(-12.2785, abs=5e-5) and compared["df"] == pytest.approx(4.372, abs=5e-4)
    assert compared["p_two_sided"] == pytest.approx(1.490e-4, abs=5e-8)
    assert compared["difference"] == pytest.approx(-0.6994)
    (verdict,) = json.loads(out)["verdicts"]
    wanted = scipy.stats.ttest_ind(np.log(TIMES), np.log(TIMES_BEFORE), equal_var=False)
    assert verdict["time"]["p"] == verdict["time"]["holm"] == compared["p_two_sided"] == 2 * compared["p"]
    assert not verdict["paired"]
    assert verdict["time"]["value"] == pytest.approx(scipy.stats.gmean(TIMES) / scipy.stats.gmean(TIMES_BEFORE))
    assert (verdict["time"]["low"], verdict["time"]["high"]) == pytest.approx(np.exp(wanted.confidence_interval(0.95)))
    assert verdict["sentence"].endswith("; time: lower by 0.49 % (p = 0.00015)")


def test_five_runs_that_fail_though_their_mean_is_below(write, judge):
    status, out, _ = judge(write("five", map(log, [3.2754, 3.2781, 3.2805, 3.2781, 3.2779],
                                             [137.554, 137.514, 137.542, 137.635, 137.898])))
    assert status == 1 and "3.27800 ± 0.0018055" in out and "p = 0.03422" in out and "Not significant" in out
    assert "137.6286 ± 0.1572 s" in out and "The claim does not hold: mean loss not significantly < 3.28" in out


@pytest.mark.parametrize("margin, n", [(0.002, 9), (0.0015, 13), (0.001, 25), (0.0005, 91)])
def test_the_plan_of_a_loss(margin, n):
    assert stats.runs_needed(0.0013, margin, 0.01, 0.9) == n
    assert stats.power(n, 0.0013, margin, 0.01) >= 0.9 > stats.power(n - 1, 0.0013, margin, 0.01)


@pytest.mark.parametrize("margin, n", [(0.2, 6), (0.1, 15)])
def test_the_plan_of_a_time(margin, n):
    """For 0.2 s five runs a side have power 0.892 by Welch's test, which decides (the pooled test has 0.917)."""
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
    times, others = drift + draw.normal(0, 0.07, (TRIALS, 10)), drift + draw.normal(0.2, 0.07, (TRIALS, 10))
    assert np.mean(stats.paired_t_less(times, others).pvalue < 0.01) > 0.99
    assert np.mean(stats.welch_t_less(times, others).pvalue < 0.01) < 0.05


@pytest.mark.parametrize("margin", [0.002, 0.0015, 0.001])
def test_a_planned_claim_against_a_target_is_found_as_often_as_promised(margin):
    n = stats.runs_needed(0.0013, margin, 0.01, 0.9)
    losses = np.random.default_rng(3).normal(3.28 - margin, 0.0013, (TRIALS, n))
    found = np.mean(stats.one_sample_t_less(losses, 3.28).pvalue < 0.01)
    assert within(found, stats.power(n, 0.0013, margin, 0.01)) and found > 0.89


@pytest.mark.parametrize("n, sds, margin", [
    (2, (0.07, 0.07), 0.6), (5, (0.07, 0.07), 0.2), (15, (0.07, 0.07), 0.1), (4, (0.2, 0.02), 0.5), (8, (0.03, 0.15), 0.2)])
def test_a_planned_comparison_is_found_as_often_as_promised(n, sds, margin):
    draw = np.random.default_rng(4)
    times, others = draw.normal(140 - margin, sds[0], (TRIALS, n)), draw.normal(140, sds[1], (TRIALS, n))
    found = np.mean(stats.welch_t_less(times, others).pvalue < 0.01)
    assert within(found, stats.power(n, sds[0], margin, 0.01, sets=2, other_sd=sds[1]))


# Looks that keep alpha

def looked_at(values, most, alpha=0.01):
    """Apply evaluate_looks to many sets at once -> (claims found, runs taken). values: [sets, most], or two of them"""
    looks, limits = np.arange(2, most + 1), stats.bounds(most, alpha)
    tests = [stats.welch_t_less(*(side[:, :n] for side in values)) if len(values) == 2 else
             stats.one_sample_t_less(values[:, :n], 0) for n in looks]
    claims = np.array([test.pvalue < limit for test, limit in zip(tests, limits)]).T
    chances = np.array([stats.predictive_power(test, n, most, limits[-1]) for test, n in zip(tests, looks)]).T
    over = claims | (chances < stats.FUTILE)
    over[:, -1] = True
    last = over.argmax(1)
    return claims[np.arange(len(claims)), last], looks[last], claims.any(1)


@pytest.mark.parametrize("most, alpha", [(2, 0.01), (7, 0.05), (20, 0.01)])
def test_looking_after_every_run_passes_a_wrong_claim_with_probability_alpha(most, alpha):
    runs = np.random.default_rng(8).normal(0, 0.7, (TRIALS, most))
    claims, _, without_futility = looked_at(runs, most, alpha)
    assert within(np.mean(without_futility), alpha)  # exact: ended by the claim alone
    assert np.mean(claims) <= np.mean(without_futility)
    if most == 20:  # what the bounds are there for
        naive = [stats.one_sample_t_less(runs[:, :n], 0).pvalue < alpha for n in range(2, most + 1, 3)]
        assert np.mean(np.any(naive, 0)) > 3 * alpha


@pytest.mark.parametrize("sds", [(1, 1), (1, 4)])
def test_looks_by_welchs_test_keep_alpha_too(sds):
    draw = np.random.default_rng(9)
    sides = np.stack([draw.normal(0, sd, (TRIALS, 8)) for sd in sds])
    found = np.mean(looked_at(sides, 8)[2])
    assert found < 0.01 + 4 * (0.01 * 0.99 / TRIALS) ** 0.5


@pytest.mark.parametrize("n", [6, 10])
def test_a_race_until_decided_has_the_plans_power_with_fewer_runs(n):
    """Expected runs: 86 to 97 % of the fixed plan's with the planned margin, half without any."""
    margin = next(margin for margin in np.arange(0.5, 3, 0.01) if stats.power(n, 1, margin, 0.01) >= 0.9)
    most = int(np.ceil(stats.LONGER * n))
    draw = np.random.default_rng(10)
    claims, taken, _ = looked_at(draw.normal(-margin, 1, (TRIALS, most)), most)
    assert np.mean(claims) > 0.9 and np.mean(taken) < 0.98 * n
    claims, taken, _ = looked_at(draw.normal(-2 * margin, 1, (TRIALS, most)), most)
    assert np.mean(claims) > 0.999 and np.mean(taken) < 0.82 * n
    assert np.mean(looked_at(draw.normal(0, 1, (TRIALS, most)), most)[1]) < 0.65 * n


def test_following_a_race_is_looking_at_it_so():
    runs = np.random.default_rng(11).normal(-0.8, 1, (200, 7))
    claims, taken, _ = looked_at(runs, 7)
    for values, claim, n in zip(runs, claims, taken):
        stop = stats.evaluate_looks([lambda look: stats.one_sample_t_less(values[:look], 0)], 7, 7, 0.01)
        assert (stop["n"], stop["outcome"] == "the claim") == (n, claim)
        assert stats.evaluate_looks([lambda look: stats.one_sample_t_less(values[:look], 0)], n - 1, 7, 0.01) is None
    assert 20 < claims.sum() < 180


def test_two_claims_must_both_be_found_and_may_be_at_different_looks():
    def at(n, p):
        return lambda look: type("Found", (), {"pvalue": p if look >= n else 0.2, "statistic": -1.0})
    assert stats.evaluate_looks([at(3, 1e-9), at(5, 1e-9)], 8, 8, 0.01)["passed"] == [3, 5]
    stop = stats.evaluate_looks([at(3, 1e-9), at(9, 0)], 8, 8, 0.01)
    assert stop["passed"] == [3, None] and stop["outcome"] == "futility"


# Losses that are skewed

def test_a_right_skew_makes_the_t_test_lenient_and_the_bootstrap_less_so():
    draw, sets = np.random.default_rng(12), 3000
    losses = draw.exponential(1, (sets, 10))
    wrong = stats.one_sample_t_less(losses, 1).pvalue < 0.01
    assert 0.045 < np.mean(wrong) < 0.075
    # the bootstrap passes what the t-test passes, or less
    beside = [stats.bootstrap_t_less(each, 1) < 0.01 for each in losses[wrong]]
    assert np.mean(beside) * np.mean(wrong) < 0.6 * np.mean(wrong)


def test_a_bootstrap_is_told_from_ten_runs_on(write, judge, new):
    skewed = [3.2701, 3.2702, 3.2700, 3.2703, 3.2701, 3.2702, 3.2704, 3.2700, 3.2702, 3.2790]
    assert "but p = 0.3" in judge(write("skewed", map(log, skewed, TIMES)))[1]
    assert "by a bootstrap-t p = " in judge(new)[1]
    assert "bootstrap" not in judge(write("nine", map(log, skewed[1:], TIMES[1:])))[1]


def test_intervals_end_where_the_one_sided_test_decides(no_plans):
    """The upper end of the loss's interval is below the target exactly if p < alpha; the same for times."""
    draw = np.random.default_rng(5)
    for shift in draw.uniform(-0.003, 0.003, 100):
        losses = draw.normal(3.28 + shift, 0.0013, 8)
        found = stats.judge_loss(losses, 3.28, 0.01)
        assert (found["interval"][1] < 3.28) == (found["p"] < 0.01)
        sides = [types.SimpleNamespace(seconds=seconds, declared={})
                 for seconds in (140 + losses, 143.28 + draw.normal(0, 0.0013, 5))]
        time = stats.contrast_times(*(side.seconds for side in sides), False, None, 1)
        found = stats.compare_times(sides, types.SimpleNamespace(time=time, paired=False), 0.01)
        assert (found["interval"][1] < 0) == (found["p"] < 0.01)


# Verdicts on a side and its base, by simulation

@pytest.fixture
def no_plans(monkeypatch):
    monkeypatch.setattr(stats, "runs_needed", lambda *_: 9)  # it takes most of the time


@pytest.mark.slow
@pytest.mark.parametrize("n, paired, skewed", [(3, True, False), (5, True, True), (10, True, False), (3, False, False),
                                               (10, False, True)])
def test_intervals_cover_the_true_difference_and_p_has_its_size(n, paired, skewed, no_plans):
    """Pairs share a seed's luck, ten times their own spread. Skewed: exponential losses, whose differences have no skew."""
    draw, trials = np.random.default_rng(21), 2000
    noise = (draw.exponential if skewed else draw.normal)(size=(trials, 2, n))
    shared = 10 * draw.normal(size=(trials, 1, n)) * paired
    ours, base = np.moveaxis(noise + shared, 1, 0)
    found = [stats.contrast(a - 0.7, b, paired, 1, 1) for a, b in zip(ours, base)]
    covered = np.mean([one.low < -0.7 < one.high for one in found])
    false = np.mean([stats.contrast(a, b, paired, 1, 1).p < stats.LEVEL for a, b in zip(ours[:1000], base)])
    # within 3 standard errors of 95 and 5 %; fewer false claims where samples are few and Welch's df cautious, or skewed
    cautious = skewed or not paired
    assert 0.935 < covered < (0.985 if cautious else 0.965) and (0.01 if cautious else 0.03) < false < 0.071


def test_the_correction_keeps_the_level_over_all_ideas(no_plans):
    """Five ideas that change nothing share a base: at most 5 % of such ladders show one."""
    draw, shown = np.random.default_rng(22), []
    for _ in range(400):
        losses = draw.normal(size=(6, 5)) + draw.normal(size=5)
        p = [stats.contrast(idea, losses[5], True, 1, 5).p for idea in losses[:5]]
        shown.append([min(p) < 0.05, min(stats.holm(p)) < 0.05])
    alone, corrected = np.mean(shown, axis=0)
    assert alone > 0.12 and 0.015 < corrected < 0.071


@pytest.mark.slow
@pytest.mark.parametrize("n, paired", [(3, True), (5, True), (5, False)])
def test_the_runs_that_a_verdict_asks_for_tell_the_difference(n, paired, monkeypatch):
    """A race of the advised length shows a true difference of the margin with the promised power, on average."""
    needed = functools.lru_cache(stats.runs_needed)
    monkeypatch.setattr(stats, "runs_needed", lambda sd, margin, alpha, wanted, sets, other: needed(
        round(10 * sd) / 10, margin, alpha, wanted, sets, round(10 * other) / 10))
    draw, powers = np.random.default_rng(23), []
    for _ in range(300):
        ours, base = draw.normal(0, 1 if paired else 2 ** 0.5, (2, n)) / 2 ** 0.5
        runs = stats.contrast(ours, base, paired, 1, 1).needed
        powers.append(stats.power(runs, 1, 1, stats.LEVEL / 2, 1 if paired else 2))
    assert stats.POWER < np.mean(powers) < 0.96


@pytest.mark.parametrize("ours, base, paired, says", [
    ([3.2], [3.3], False, "unknown, one run a side shows no spread; race with -n 5"),
    ([3.2, 3.1, 3.0], [3.2, 3.1, 3.0], True, "the same"),
    ([3.2, 3.1, 3.0], [3.3, 3.2, 3.1], True, "unknown, all runs differ by the same amount"),
    ([3.2, 3.101, 3.0], [3.3, 3.2, 3.1], True, "lower by 0.0997 (p = 1.1e-05)"),
    ([3.3, 3.2, 3.1], [3.2, 3.101, 3.0], True, "higher by 0.0997 (p = 1.1e-05)"),
    ([3.2, 3.1, 3.0], [3.2, 3.1002, 2.9999], True, "no difference shown (p = 0.74; 3 runs a side suffice to detect 0.1 %)"),
    ([3.2, 3.1, 3.0], [3.2, 3.101, 2.9999], True, "no difference shown (p = 0.48; -n 4 is needed to detect 0.1 %)"),
    ([3.2, 3.11, 3.0], [3.2, 3.1, 3.01], True, "no difference shown (p = 1; too noisy to detect 0.1 %)"),
    ([3.2, 3.103, 3.0], [3.2, 3.1, 3.001], True, "no difference shown (p = 0.63; -n 18 is needed to detect 0.1 %)")])
def test_what_a_verdict_says_of_a_loss(ours, base, paired, says):
    found = stats.contrast(ours, base, paired, 0.0031, 1)
    found.holm = found.p
    assert stats.describe("loss", found, len(ours), f"{abs(found.value):.4f}", 0.001) == f"loss: {says}"


@pytest.mark.parametrize("factor", [0.3, 0.5])
def test_a_first_run_that_does_not_count_gives_pairs_their_power_on_a_cold_machine(factor):
    """The machine starts 1.5 s slow and cools off by this factor a run; ten pairs, a true gain of 0.2 s in 140."""
    draw, at = np.random.default_rng(24), np.arange(20)
    first = (at // 2 % 2 == 0) == (at % 2 == 0)  # side a's places in a b, b a, a b
    powers = []
    for skipped in (0, 1):
        seconds = 140 + 1.5 * factor ** (at + skipped) + draw.normal(0, 0.07, (4000, 20))
        powers.append(np.mean(stats.paired_t_less(np.log(seconds[:, first] - 0.2), np.log(seconds[:, ~first])).pvalue < 0.01))
    assert powers[0] < 0.03 and powers[1] > 0.7


# Verdicts

def test_a_claim_needs_both_halves(new, old, write, judge):
    assert judge(new, "--vs", old)[0] == 0
    status, out, _ = judge(old, "--vs", new)
    assert status == 1 and "time: higher by 0.5 %" in out and "not significantly faster" in out
    bad = write("bad", (log(loss + 0.01, seconds, "bad") for loss, seconds in zip(LOSSES, TIMES)))
    status, out, _ = judge(bad, "--vs", old)
    assert status == 1 and "mean loss not significantly < 3.28" in out and ", faster (p" in out


def test_target_and_alpha(new, judge):
    assert judge(new, "--target", 3.2775)[0] == 1
    assert judge(new, "--alpha", 1e-5)[0] == 1
    assert judge(new, "--target", 3.3, "--alpha", 1e-5)[0] == 0


def test_the_target_that_all_logs_state(write, judge, refusal):
    def stating(*targets):
        return [log(loss, t, start={"target_val_loss": target}) for loss, t, target in zip(LOSSES, TIMES, targets)]
    low = write("low", stating(*[3.2] * 10))
    status, out, _ = judge(low)
    assert status == 1 and "target 3.2)" in out
    status, out, _ = judge(low, "--target", 3.28)
    assert status == 2 and out.startswith("Not the declared claim: target 3.28, and the logs state 3.2\n")
    assert "the targets 3.2, 3.3" in refusal(write("two", stating(*[3.2] * 5, *[3.3] * 5)))
    for name, odd in (("text", "x"), ("true", True), ("nan", float("nan")), ("inf", float("-inf")), ("long", 10**400)):
        folder = write(name, stating(*[odd] * 10))
        assert "the logs state the targets " in refusal(folder) and judge(folder, "--target", 3.28)[0] == 0


def test_llm_c_logs_give_a_loss_and_no_time(write, judge, refusal, old):
    folder = write("llmc", (f"s:0 tel:10.9{i:03}\ns:9 tel:{loss:.4f}\n" for i, loss in enumerate(LOSSES)))
    status, out, _ = judge(folder)
    assert status == 0 and "Time" not in out
    assert "this form states no total: whether the run is complete cannot be known (10 of 10 runs" in out
    assert "no source" in out
    assert "different numbers of GPUs (unknown against 8)" in refusal(folder, "--vs", old)
    assert "no train_time" in refusal(folder, "--vs", old, "--mixed")
    assert "loss: lower by 0.0016 (p = 0.015); time: not measured." in judge(folder, "--vs", old, "--mixed")[1]


# What cannot be judged

def test_a_path_that_is_not_there(new, refusal, judge):
    assert "none/*.txt: unreadable" in refusal(new, "none/*.txt")
    status, out, _ = judge("none", "--json")
    assert status == 2 and json.loads(out)["verdict"] == "the claim cannot be judged"


def test_mixed_sources(new, old, refusal, judge):
    message = refusal(new, old)
    source = re.search(r"--source (\w{8})", message)[1]
    assert "runs of 2 sources" in message and f"{source} (10: 0.txt" in message and "--mixed" in message
    status, out, _ = judge(new, old, "--source", source)
    assert status == 0 and "10 runs" in out and out.count(f"of another source than {source}") == 4
    status, out, _ = judge(new, old, "--mixed")
    assert "Loss (14 runs" in out and "Warning: judged as one set although the set holds runs of 2 sources" in out
    assert "no run that can be used" in refusal(new, "--source", "0000")


def test_too_short_a_hash(write, refusal):
    folder = write("many", (log(3.27 + i / 999, 140 + i / 9, f"source {i}") for i in range(17)))
    shared = next(digit for digit in "0123456789abcdef"
                  if "sources" in refusal(folder, "--source", digit))  # 17 hashes, 16 first digits
    assert re.search(rf"runs of \d sources: {shared}\w{{7}} \(1: ", refusal(folder, "--source", shared))


def test_mixed_sources_in_the_other_set(new, old, write, refusal, judge):
    third = write("third", (log(3.28 + i / 999, 150 + i / 9, "third") for i in range(3)))
    source = re.search(r"--source (\w{8}) \(of the second set --vs-source", refusal(new, "--vs", old, third))[1]
    assert judge(new, "--vs", old, third, "--vs-source", source)[0] == 0


def test_one_source_with_two_configs(write, refusal, judge):
    def configured(rate):
        return [log(loss, t, start={"config": {"lr": rate(i), "seed": i, "race_run": i, "run_id": str(i)}})
                for i, (loss, t) in enumerate(zip(LOSSES, TIMES))]
    assert judge(write("one", configured(lambda i: 0.1)))[0] == 0
    assert "whose lr differs: 0.1 (5), 0.2 (5)" in refusal(write("two", configured(lambda i: 0.1 * (1 + i % 2))))


def test_one_gpu_runs_among_others(write, refusal, judge, old):
    folder = write("gpus", (log(loss, t, gpus=1 if i == 3 else 8) for i, (loss, t) in enumerate(zip(LOSSES, TIMES))))
    message = refusal(folder)
    assert "different numbers of GPUs: 8 (9: 0.txt" in message and "1 (1: 3.txt)" in message and "--gpus 8" in message
    status, out, _ = judge(folder, "--gpus", 8)
    assert status == 0 and "3.txt: not a run on 8 GPUs" in out
    ones = write("ones", (log(loss, t, gpus=1) for loss, t in zip(LOSSES, TIMES)))
    assert "(1 against 8)" in refusal(ones, "--vs", old)


def test_copies_count_once_and_are_named(new, judge):
    for name in ("copy.txt", "again.txt"):
        (Path(new) / name).write_text((Path(new) / "0.txt").read_text())
    status, out, _ = judge(new)
    assert status == 0 and "Loss (10 runs" in out and "copy.txt: byte-identical: " in out


def test_rejected_logs_are_named_and_incomplete_ones_warned_of(new, judge):
    """A file that is none by its name is named only where nothing else is there."""
    (Path(new) / "cut.txt").write_text(log(3.27, 140)[:-400])
    (Path(new) / "README.md").write_text("Ten runs.")
    status, out, _ = judge(new)
    assert status == 0 and "cut.txt: incomplete: " in out and "README.md" not in out
    assert "Warning: started but not counted: cut.txt; give the reason" in out
    status, _, err = judge(Path(new) / "README.md")
    assert status == 2 and "README.md: not a log: a .md file" in err


def test_a_diverged_run_speaks_against_the_claim(new, old, judge):
    (Path(new) / "nan.txt").write_text(log(float("nan"), 140))
    status, out, err = judge(new)
    assert status == 2 and "nan.txt of the set diverged (val_loss is nan at step 5 of 20" in out + err
    (Path(new) / "nan.txt").write_text(log(float("nan"), 140, source="another experiment"))
    assert judge(new)[0] == 0
    (Path(old) / "nan.txt").write_text(log(float("nan"), 140, source="old"))
    status, out, err = judge(new, "--vs", old)
    assert status == 2 and "nan.txt of the --vs set diverged" in out + err


def test_a_time_that_no_run_takes_is_not_judged(new, old, judge):
    (Path(new) / "x.txt").write_text(log(3.277, 0))
    status, out, _ = judge(new)
    assert status == 0 and "Loss (11 runs" in out and "Time" not in out.split("Warning")[0]
    assert "train_time is not above zero on the last line of x.txt" in out
    status, out, err = judge(new, "--vs", old)
    assert status == 2 and "no train_time above zero on the last validation line of x.txt" in out + err


# Races: n declared before the first run

def raced(n, sides="a", declared=None, race_id="r", shift=0.0, skip=(), drift=0.0, seed=0):
    """Return the logs of a race with n runs a side and seeds seed + i.

    Side b is slower by shift; the machine slows by drift from run to run."""
    draw, contents = np.random.default_rng(7), []
    for i in range(1, n + 1):
        for side in sides:
            seconds = round(140 + drift * i + draw.normal(0, 0.07) + (shift if side == "b" else 0), 3)
            race = {"race_id": race_id, "run": i, "declared_n": declared or n, "side": side}
            content = log(round(draw.normal(3.277, 0.001), 4), seconds, side, start={"race": race, "seed": seed + i})
            if (i, side) not in skip:
                contents.append(content)
    return contents


def test_a_whole_race(write, judge):
    status, out, _ = judge(write("race", raced(10)))
    assert status == 0 and "declares no number" not in out and "Warning" not in out


RACE = raced(10)
OTHER_RACE = [content.replace("train_time:1", "train_time:2") for content in raced(5, race_id="q", seed=5)]
SAME_SEEDS = [content.replace("train_time:1", "train_time:2") for content in raced(5, race_id="q")]
STEADY = {name: [log(3.27 + i / 999, seconds, name) for i in range(3)] for name, seconds in (("a", 140), ("b", 141), ("zero", 0))}
LENGTHS = ["\n".join(["import torch", "=" * 100, *(f"s:{step} tel:{5 - step / 1000:.4f}" for step in range(0, last + 1, 250)), ""])
           for last in (500, 250)]


@pytest.mark.parametrize("says, contents, others, flags", [
    ("at least 2 runs, and there is 1", [log(3.2, 140)], [], []),
    ("at least 2 runs a side, and one has 1", map(log, LOSSES, TIMES), [log(3.2, 141, "other")], []),
    ("no run that can be used", ["hello"], [], []),
    ("a folder without files", [], [], []),
    ("with sd 0 a t-test is not defined", [log(3.27, 140 + i / 7) for i in range(5)], [], []),
    ("with sd 0", STEADY["a"], STEADY["b"], []),
    ("no train_time above zero", STEADY["a"], STEADY["zero"], []),
    ("different lengths in steps: 20 (5: 0.txt", [log(LOSSES[i], TIMES[i], steps=20 + 5 * (i % 2)) for i in range(10)], [], []),
    ("different lengths in steps: 500 (1: 0.txt), 250 (1: 1.txt)", LENGTHS, [], []),
    ("0.txt is in both sets", map(log, LOSSES, TIMES), [log(LOSSES[0], TIMES[0]), *STEADY["a"]], ["--mixed"]),
    ("race r, side a: 10 runs were declared and 9 can be used; pass", RACE[:9], [], []),
    ("9 can be used; run 10 (9.txt): incomplete: ", [*RACE[:9], RACE[9][:-300]], [], []),
    ("9 runs were declared and 10 can be used", raced(10, declared=9), [], []),
    ("run 5 is there more than once", [content.replace('"run": 4', '"run": 5') for content in RACE], [], []),
    ("different races: r (5), q (5)", raced(5) + OTHER_RACE, [], []),
    ("2 runs of the set share the seed 1 (0.txt, 5.txt)", raced(5) + SAME_SEEDS, [], ["--mixed"]),
    ("10 runs of the set share the seed 7",
     [log(loss, t).replace("|   0  ", "Using seed=7\n|   0  ", 1) for loss, t in zip(LOSSES, TIMES)], [], []),
    ("2.txt contradicts itself: its end states final_val_loss",
     [*raced(5)[:2], re.sub("val_loss:3.27.*? ", "val_loss:3.2701 ", raced(5)[2]), *raced(5)[3:]], [], [])])
def test_sets_that_cannot_be_judged_are_refused(write, refusal, says, contents, others, flags):
    assert says in refusal(write("set", contents), *(["--vs", write("other", others)] if others else []), *flags)


def test_runs_of_two_races_may_be_mixed(write, judge):
    assert judge(write("races", raced(5) + OTHER_RACE), "--mixed")[0] == 0


def test_both_sides_of_a_race(write, judge, refusal):
    folder = write("race", raced(10, "ab", shift=0.2))
    status, out, _ = judge(folder)
    assert judge(folder, "--side", "a") == (status, out, "")
    assert status == 0 and "Time of side a less than that of side b (10 runs)" in out
    assert judge(folder, "--side", "b")[0] == 1
    assert "9 can be used" in refusal(write("hole", raced(10, "ab", skip=[(4, "b")])), "--side", "a")
    assert "these have a, b" in refusal(folder, "--side", "c")


def declare(folder, **words):
    """Write a race.jsonl beside the logs of raced()."""
    race = {"id": "r", "sides": {side: {"revision": None, "flags": []} for side in "ab"}, "ranks": 8, "n": 10, "seed": 0,
            "alpha": 0.01, "test": "paired", **words}
    race["order"] = ["x"] * race["n"] * len(race["sides"])
    (Path(folder) / "race.jsonl").write_text(json.dumps({"race": race}) + "\n")
    return folder


def test_the_test_that_was_declared_decides(write, judge, refusal):
    """On a drifting machine the paired test of log time finds the gain and Welch's does not; the declared one decides.

    The p of the claim, by hand, is one-sided, that of the table two-sided, of the same test."""
    folder = write("race", raced(10, "ab", shift=0.2, drift=1.0))
    runs = json.loads(judge(folder, "--side", "a", "--json")[1])["runs"]
    ours, theirs = (np.array([run["train_time_ms"] for run in runs if run["set"] == f"side {side}"]) for side in "ab")
    for test, wanted, status in (
            (None, scipy.stats.ttest_ind(ours, theirs, equal_var=False, alternative="less"), 1),
            ("unpaired", scipy.stats.ttest_ind(np.log(ours), np.log(theirs), equal_var=False, alternative="less"), 1),
            ("paired", scipy.stats.ttest_rel(np.log(ours), np.log(theirs), alternative="less"), 0)):
        if test:
            declare(folder, test=test)
        for side, tail in (("a", wanted.pvalue), ("b", 1 - wanted.pvalue)):
            report = json.loads(judge(folder, "--side", side, "--json")[1])
            compared, (verdict,) = report["comparison"], report["verdicts"]
            assert compared["p"] == pytest.approx(tail)
            assert verdict["time"]["p"] == pytest.approx(2 * min(tail, 1 - tail))
            assert abs(compared["t"]) == pytest.approx(abs(wanted.statistic))
            assert ("interval" in compared) == (test is None)
        assert judge(folder, "--side", "a")[0] == status
    out = judge(folder, "--side", "a")[1]
    assert "faster by the paired test of log time (p = " in out and "Welch" not in out and "Time of" not in out
    assert judge(declare(folder, id="another"), "--side", "a")[0] == 1  # says nothing of this race
    (Path(folder) / "race.jsonl").write_text('{"race": ' + "[" * 100_000)
    assert judge(folder, "--side", "a")[0] == 2
    (Path(folder) / "race.jsonl").write_text('{"race": ' + "[" * 100_000 + "\n")
    assert "race.jsonl: line 1 is no line of a race" in refusal(folder, "--side", "a")


def test_pairs_in_turn_find_through_a_drift_what_welchs_test_does_not():
    """A drift of 0.1 s a run and a true gain of 0.2 s, with runs a b, b a, ..."""
    for n, least, most in ((5, 0.3, 0.6), (10, 0.9, 1)):
        draw, at = np.random.default_rng(14), np.arange(2 * n)
        first = (at // 2 % 2 == 0) == (at % 2 == 0)  # side a's places in a b, b a, a b
        seconds = 140 + 0.1 * at + draw.normal(0, 0.07, (4000, 2 * n))
        ours, theirs = seconds[:, first] - 0.2, seconds[:, ~first]
        assert least < np.mean(stats.paired_t_less(np.log(ours), np.log(theirs)).pvalue < 0.01) <= most
        assert np.mean(stats.welch_t_less(ours, theirs).pvalue < 0.01) < 0.02


def test_losses_and_times_of_two_sides_make_one_verdict(write, judge):
    """By hand; the losses are taken without rounding where the logs state them."""
    def exact(content):
        rounded = re.search(r"step:20/20 val_loss:([\d.]+)", content)[1]
        return content + json.dumps({"end": {"final_val_loss": float(f"{rounded}123")}}) + "\n"
    folder = declare(write("race", map(exact, raced(10, "ab", shift=0.2))))
    report = json.loads(judge(folder, "--side", "a", "--json")[1])
    ours, theirs = (np.array([[run["val_loss"] + 1.23e-5, run["train_time_ms"]] for run in report["runs"] if run["set"] == f"side {side}"]).T
                    for side in "ab")
    assert report["loss"]["p"] == pytest.approx(scipy.stats.ttest_1samp(ours[0], 3.28, alternative="less").pvalue)
    (found,), wanted = report["verdicts"], scipy.stats.ttest_rel(ours[0], theirs[0])
    assert found["loss"]["value"] == pytest.approx(np.mean(ours[0] - theirs[0])) and found["loss"]["p"] == pytest.approx(wanted.pvalue)
    assert (found["loss"]["low"], found["loss"]["high"]) == pytest.approx(tuple(wanted.confidence_interval(0.95)))
    assert found["mean_loss"] == pytest.approx(ours[0].mean(), abs=1e-9) and found["n"] == 10 and found["paired"]
    wanted = scipy.stats.ttest_rel(*np.log([ours[1], theirs[1]]))
    assert found["time"]["p"] == pytest.approx(wanted.pvalue)
    assert np.log([found["time"]["low"], found["time"]["high"]]) == pytest.approx(tuple(wanted.confidence_interval(0.95)))
    unpaired = json.loads(judge(declare(folder, test="unpaired"), "--side", "a", "--json")[1])["verdicts"][0]
    assert unpaired["loss"] == found["loss"] and unpaired["time"]["p"] == pytest.approx(
        scipy.stats.ttest_ind(*np.log([ours[1], theirs[1]]), equal_var=False).pvalue)
    shown = judge(folder, "--side", "a")[1]
    assert f"base: {unpaired['sentence']}." in " ".join(shown.split())


def test_a_race_without_a_target_has_a_verdict_and_no_claim(write, judge):
    contents = [content.replace('"seed"', '"target_val_loss": 0, "seed"') for content in raced(5, "ab", shift=0.2)]
    folder = write("race", contents)
    status, out, err = judge(folder, "--side", "a")
    assert status == 0 and not err and "No claim was declared: the runs had no target loss" in out
    assert "mean <" not in out and "; time: lower by 0." in out and "side b" in out
    report = json.loads(judge(folder, "--side", "a", "--json")[1])
    assert report["loss"]["target"] is None and report["comparison"] is None and len(report["verdicts"]) == 1
    assert judge(folder, "--side", "a", "--target", "3.28")[0] == 0 and judge(folder, "--side", "b", "--target", "3.28")[0] == 1
    assert judge(write("alone", [content for content in contents if '"side": "a"' in content]))[0] == 0
    one = write("one", [content for content in raced(1, "ab", shift=0.2)])
    status, out, err = judge(one, "--side", "a")
    assert status == 2 and "at least 2 runs" in err and "one run a side shows no spread; race with -n 5" in out


# Races that run until they are decided

def until_decided(write, n, most=12, shift=0.2, **words):
    return declare(write(f"{n}{shift}", raced(n, "ab", declared=most, shift=shift)), n=most, until_decided=True, **words)


def test_a_race_until_decided_is_judged_by_its_bounds(write, judge, refusal):
    early = refusal(until_decided(write, 3), "--side", "a")
    assert "after 3 of at most 12 runs it is not; resume it with race.py --resume" in early
    n = next(n for n in range(4, 13) if judge(until_decided(write, n), "--side", "a")[0] != 2)
    status, out, _ = judge(folder := until_decided(write, n), "--side", "a", "--json")
    stop = json.loads(out)["stop"]
    assert status == 0 and 4 < n < 10 and stop["n"] == n and stop["outcome"] == "the claim"
    assert stop["bound"] == stats.bounds(12, 0.01)[n - 2] < 0.01
    status, out, _ = judge(folder, "--side", "a")
    assert f"decided for the claim after {n} of at most 12 runs, at alpha 0.01 over all looks" in out
    assert f"Looks: decided for the claim after {n} of at most 12 runs, where p had to be below 0.00" in out
    further = until_decided(write, n + 1)
    assert f"the race was decided after {n} runs and continued to {n + 1}; the decision stands" in judge(further, "--side", "a")[1]
    assert "declared to run until it is decided at alpha 0.01, not 0.05" in refusal(folder, "--side", "a", "--alpha", .05)
    for path in Path(folder).glob("*.txt"):
        if '"run": 2, "declared_n": 12, "side": "b"' in path.read_text():
            path.unlink()
    assert f"12 runs were declared and {n - 1} can be used" in refusal(folder, "--side", "a")


def test_what_is_below_alpha_but_not_below_the_bound_does_not_hold(write, judge):
    runs = json.loads(judge(declare(write("level", raced(4, "ab")), n=4), "--side", "a", "--json")[1])["runs"]
    ours, theirs = (np.array([run["train_time_ms"] for run in runs if run["set"] == f"side {side}"]) for side in "ab")
    shift = next(shift for shift in np.arange(0, 2, 0.001) if
                 stats.bounds(4, 0.01)[-1] < stats.paired_t_less(np.log(ours), np.log(theirs + 1000 * shift)).pvalue < 0.01)
    status, out, _ = judge(until_decided(write, 4, 4, round(shift, 3)), "--side", "a", "--json")
    report = json.loads(out)
    assert report["stop"]["bound"] < report["comparison"]["p"] < 0.01 and status == 1
    assert report["stop"]["outcome"] == "the last look" and not report["comparison"]["significant"]


@pytest.mark.parametrize("test", ["paired", "unpaired"])
def test_a_race_until_decided_ends_for_want_of_a_chance(write, judge, test):
    n = next(n for n in range(2, 13) if judge(until_decided(write, n, shift=-0.05, test=test), "--side", "a")[0] != 2)
    status, out, _ = judge(until_decided(write, n, shift=-0.05, test=test), "--side", "a")
    assert status == 1 and n < 8 and f"not significantly faster{' by the paired test of log time' * (test == 'paired')}" in out
    assert f"decided for futility after {n} of at most 12 runs" in out


def test_pairs_are_looked_at_in_the_order_of_their_runs(write, judge):
    """Runs 10 to 12 come after run 9, so that they do not change what was decided before."""
    decided = json.loads(judge(until_decided(write, 12), "--side", "a", "--json")[1])["stop"]
    contents = raced(12, "ab", declared=12, shift=0.2)
    slow = [re.sub(r"train_time:(\d+)", lambda ms: f"train_time:{2 * int(ms[1])}", content)
            if re.search('"run": 1[012].*"side": "a"', content) else content for content in contents]
    assert slow != contents and decided["n"] < 10
    folder = declare(write("slow", slow), n=12, until_decided=True)
    assert json.loads(judge(folder, "--side", "a", "--json")[1])["stop"] == decided


def test_a_race_until_decided_is_not_decided_by_skewed_losses_alone(write, judge, refusal):
    """The t-test passes these losses, and the bootstrap-t, which allows for the skew, does not."""
    losses = np.round(3.28 - 0.001 * np.array([0.2, 0.95, 0.9, 0.97, 0.93, 0.96]), 6)
    assert stats.one_sample_t_less(losses, 3.28).pvalue < stats.bounds(6, 0.01)[-1]
    contents = [re.sub("val_loss(:|.: )3.27.*?(?=[ }])", rf"val_loss\g<1>{losses[i]:.6f}", content)
                for i, content in enumerate(raced(6, declared=6))]
    race = declare(write("skewed", contents), until_decided=True, n=6, sides={"": {"revision": None, "flags": []}})
    status, out, _ = judge(race, "--json")
    report = json.loads(out)
    assert report["loss"]["p"] < report["stop"]["bound"] and stats.bootstrap_t_less(losses, 3.28) > 0.01
    assert status == 1 and not report["loss"]["significant"] and report["stop"]["outcome"] == "the last look"


def test_equal_losses_decide_no_race(write, refusal):
    """Two losses with four decimals are equal and below the target in 1 % of races without a gain; their t-test has p = 0."""
    losses = [3.2795, 3.2795, 3.2801]
    contents = [re.sub("val_loss(:|.: )3.27.*?(?=[ }])", rf"val_loss\g<1>{loss:.4f}", content) for loss, content in zip(losses, raced(3, declared=7))]
    assert stats.one_sample_t_less(losses[:2], 3.28).pvalue == 0
    race = declare(write("equal", contents), until_decided=True, n=7, sides={"": {"revision": None, "flags": []}})
    assert "after 3 of at most 7 runs it is not" in refusal(race)


def test_a_race_of_one_version_until_decided(write, judge, refusal):
    def race(n):
        return declare(write(f"one{n}", raced(n, declared=10)), until_decided=True, sides={"": {"revision": None, "flags": []}})
    n = next(n for n in range(2, 10) if judge(race(n))[0] != 2)
    assert 3 < n < 9 and judge(race(n))[0] == 0 and "after 2 of at most 10 runs" in refusal(race(2))


def test_the_plan_of_a_pilot_says_both_powers(write, judge):
    pilot = write("pilot", raced(6, "ab", shift=0.2, drift=0.3))
    found = json.loads(judge("--plan", pilot, "--side", "a", "--json")[1])
    unpaired, paired = found["needed"]
    assert (unpaired["claim"], paired["claim"]) == ("less time, unpaired", "less time, paired") and found["n"] == 6
    assert paired["runs"] < 10 < 20 < unpaired["runs"]
    assert unpaired["powers"][str(paired["runs"])] < 0.2 < 0.9 < paired["powers"][str(unpaired["runs"])]
    assert found["margin"] == pytest.approx(0.2, abs=0.1) and found["other_sd"] > 0.3
    runs = json.loads(judge(pilot, "--side", "a", "--json")[1])["runs"]
    ours, theirs = (np.array([run["train_time_ms"] / 1000 for run in runs if run["set"] == f"side {s}"]) for s in "ab")
    seen, margin = [np.std(values, ddof=1) for values in (ours, theirs)], -np.log(1 - found["margin"] / theirs.mean())
    spread, bound = np.std(np.log(theirs / ours), ddof=1), (5 / scipy.stats.chi2.ppf(0.2, 5)) ** 0.5
    assert found["seen"] == pytest.approx(seen) and [found["sd"], found["other_sd"]] == pytest.approx([bound * sd for sd in seen])
    assert paired["power"] == pytest.approx(stats.power(paired["runs"], bound * spread, margin, 0.01))
    assert unpaired["power"] == pytest.approx(stats.power(unpaired["runs"], bound * seen[0], found["margin"], 0.01, 2,
                                                          bound * seen[1]))
    status, out, _ = judge("--plan", pilot, "--side", "a", "--margin", 0.2)
    assert status == 0 and re.search(r"less time, paired: +\d runs a side \(power 0.9\d\d; 1.000 with \d+\)", out)
    assert f"(upper 80 % bound; the runs show {seen[0]:.4g} and {seen[1]:.4g})" in out


@pytest.mark.parametrize("n", [3, 5, 10])
def test_a_plan_from_a_pilot_keeps_its_promise_on_average(n, monkeypatch):
    """With the pilot's own sd, the plan for power 0.9 has 0.66 to 0.68, 0.75 to 0.77 and 0.83 to 0.84."""
    needed = functools.lru_cache(stats.runs_needed)
    monkeypatch.setattr(stats, "runs_needed", lambda sd, margin, **others: needed(round(10 * sd) / 10, margin, **others))
    draw, options = np.random.default_rng(12), stats.parse(["--plan", "pilot", "--target", "0", "--margin", "1"])
    monkeypatch.setattr(stats, "check_one_experiment", lambda side, mixed: None)
    powers = []
    for _ in range(150):
        pilot = types.SimpleNamespace(losses=draw.normal(-1, 1, n), runs=[])
        monkeypatch.setattr(stats, "choose_sides", lambda options: [pilot])
        powers.append(stats.power(stats.plan(options)["needed"][0]["runs"], 1, 1, 0.01))
    assert 0.89 < np.mean(powers) < 0.96


# Runs that were resumed

def resumed(content):
    return content.replace("\nstep:11/", '\n{"resumed": {"from_step": 10}}\nstep:11/', 1)


def test_resumed_runs_do_not_count(write, judge, refusal, new):
    contents = [log(loss, t, start={"seed": i}) for i, (loss, t) in enumerate(zip(LOSSES, TIMES))]
    contents[3] = resumed(contents[3])
    contents[4] = log(LOSSES[4], TIMES[4], start={"seed": 4, "init_from": {"path": "x.pt", "sha256": "0"}})
    folder = write("resumed", contents)
    out = judge(folder)[1]
    assert "Loss (8 runs" in out and re.search(r"3.txt: resumed at step 10: it had ended before", out)
    assert "4.txt: begun from saved parameters (init_from)" in out
    race = raced(10)
    race[6] = resumed(race[6])
    message = refusal(folder := write("race", race))
    assert "10 runs were declared and 9 can be used; 6.txt: resumed at step 10: it had ended" in message


# One line

def test_what_cannot_be_judged_is_said_in_300_characters(write, capsys):
    many = write("many", (log(3.27 + i / 9999, 140 + i / 9, f"source {i}", start={"seed": i, "config": {"x": "y" * 400 + str(i)}})
                          for i in range(300)))
    seeds = write("seeds", (log(3.27 + i / 9999, 140 + i / 9, start={"seed": 1}) for i in range(300)))
    for arguments, end in (([many], "to judge them as one set.\n"), ([seeds], "distinct seeds.\n"),
                           ([f"{many}/nothing{i}.txt" for i in range(100)], "check the path and its permissions.\n")):
        assert stats.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and len(error) <= 301 and error.endswith(end)


def test_runs_of_different_races_are_no_pairs(write, judge):
    ours, theirs = write("ours", raced(10)), write("theirs", raced(10, "b", race_id="q", shift=0.2))
    status, out, _ = judge(ours, "--vs", theirs)
    assert status == 0 and "pairs" not in out
    fewer = write("fewer", raced(4, "b", shift=0.2))
    assert "pairs" not in judge(ours, "--vs", fewer)[1]


def test_runs_of_one_seed_are_not_independent(write, judge, refusal):
    """With deterministic training, two seeds run five times each give two losses, but p as if there were ten."""
    twice = [content.replace('"seed": 2}', '"seed": 1}') for content in raced(10)]
    message = refusal(folder := write("race", twice))
    assert "2 runs of the set share the seed 1 (0.txt, 1.txt): they are not independent" in message
    assert "share the seed 1" in refusal(folder, "--mixed")
    both = raced(10, "ab", shift=0.2)
    assert judge(write("both", both), "--side", "a")[0] == 0  # across sides a seed may come twice
    mixed = [content.replace('"seed": 2}', f'"seed": 1, "config": {{"lr": {i}, "seed": 1}}}}')
             for i, content in enumerate(raced(10))]
    assert "whose lr differs" in refusal(folder := write("mixed", mixed))
    assert judge(folder, "--mixed")[0] == 0  # one seed, but another experiment


def test_start_lines_of_any_content_do_not_break_the_tool(write, judge):
    odd = [{"race": 3}, {"race": {"race_id": [], "run": {}, "declared_n": "x"}}, {"seed": {}}, {"config": [1]},
           {"target_val_loss": {}}, {"ranks": "x"}, {"started": 5}]
    for i, start in enumerate(odd):
        folder = write(f"odd{i}", [log(loss, t, start=start) for loss, t in zip(LOSSES, TIMES)])
        for flags in ([], ["--json"]):
            assert judge(folder, *flags)[0] in (0, 2)


# Warnings about times

def test_a_clock_set_back_late_is_warned_of_and_decides_no_claim(write, judge, old, refusal):
    early = write("early", (log(loss, t, clock_reset=2) for loss, t in zip(LOSSES, TIMES)))
    late = write("late", (log(loss, t, clock_reset=12) for loss, t in zip(LOSSES, TIMES)))
    assert "was reset" not in judge(early)[1] and judge(early, "--vs", old)[0] == 0
    status, out, _ = judge(late)
    assert status == 0 and "the clock was reset during training" in out
    assert "the clock was reset during training (0.txt, " in refusal(late, "--vs", old)
    assert "the clock was reset during training (0.txt, " in refusal(old, "--vs", late)


# The command

def test_plans_on_the_command_line(judge, refusal, new, write):
    status, out, _ = judge("--plan", "--sd", 0.0013, "--margin", 0.002)
    assert status == 0 and re.search(r"mean below a target: +9 runs \(power 0.928\)", out)
    assert '--until-decided --max-n 12 has the power of "mean below a target"' in out
    status, out, _ = judge("--plan", "--sd", 0.07, "--margin", 0.2)
    assert re.search(r"less than another set: +6 runs a side \(power 0.9", out)
    assert "--until-decided" not in out  # with so few runs, looks take as many and lose power
    assert "), if the other side also has sd 0.07\n" in out
    shown = "sd 0.001894 (upper 80 % bound; the runs show 0.001465), margin 0.00286, from 10 runs in the logs"
    assert shown in judge("--plan", new)[1]
    assert "--plan needs --sd and --margin" in refusal("--plan", "--sd", 1)
    assert "above 0" in refusal("--plan", "--sd", 0.1, "--margin", -1)
    untimed = write("llmc", (f"s:0 tel:10.9{i:03}\ns:9 tel:{loss:.4f}\n" for i, loss in enumerate(LOSSES)))
    assert "no train_time above zero" in refusal("--plan", untimed, "--vs", new)
    pilot = write("pilot", raced(3, "ab", shift=0.2))
    assert "cannot fall by 500 s" in refusal("--plan", pilot, "--side", "a", "--margin", 500)
    for path in Path(pilot).iterdir():  # as fast on both sides, pair by pair
        number = re.search(r'"run": (\d)', path.read_text())[1]
        path.write_text(re.sub(r"(step:20/20 .*train_time:)\d+", rf"\g<1>14{number}000", path.read_text()))
    assert "less time, paired" not in judge("--plan", pilot, "--side", "a", "--margin", 1)[1]
    assert "more than 1,000,000 runs" in refusal("--plan", "--sd", 1, "--margin", 1e-9)
    found = json.loads(judge("--plan", "--json", new)[1])
    assert found["n"] == 10 and [needed["runs"] for needed in found["needed"]] == [9, 13]
    assert json.loads(judge("--plan", "--json", "--sd", 1)[1])["verdict"] == "the claim cannot be judged"


@pytest.mark.parametrize("arguments", [
    [], ["x", "--alpha", "2"], ["x", "--target", "nan"], ["x", "--side", "a", "--vs", "y"], ["--plan", "--power", "1"],
    ["x", "--alp", "0.1"], ["x", "--sd", "1"], ["x", "--margin", "1"],
    *(["--plan", "--sd", "1", "--margin", "1", *more] for more in (
        ["--plot", "x.png"], ["--vs", "x"], ["--vs-source", "x"], ["--side", "a"]))])
def test_flags_that_make_no_sense(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        stats.main(arguments)
    assert left.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_the_plot(new, old, write, judge, refusal, tmp_path):
    pytest.importorskip("matplotlib")
    llmc = write("llmc", (f"s:0 tel:10.9{i:03}\ns:9 tel:{loss:.4f}\n" for i, loss in enumerate(LOSSES)))
    os.rename(old, old := str(tmp_path / os.fsdecode(b"\xff")))  # no font has it
    for i, arguments in enumerate(([new, "--vs", old], [llmc])):
        path = tmp_path / f"{i}.png"
        assert judge(*arguments, "--plot", path)[0] == 0
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
    assert "cannot write the plot" in refusal(new, "--plot", tmp_path / "none" / "x.png")


def test_a_short_run_alone_is_drawn_with_its_training_losses(write, judge, monkeypatch, tmp_path):
    figures = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: figures.append(self))
    lines = [f"step:{i}/20 train_time:{i}ms step_avg:1.00ms train_loss:{5 - i / 10:.4f}" for i in range(1, 21)]
    one = write("one", ["\n".join(["x", "=" * 100, *lines, "step:20/20 val_loss:3.2000 train_time:20ms step_avg:1.00ms", ""])])
    status, _, err = judge(one, "--plot", tmp_path / "x.png")
    assert status == 2 and "at least 2 runs" in err
    trained, validated = figures[0].axes[0].lines[:2]
    assert trained.get_label() == "the set, n = 1" and trained.get_ydata() == pytest.approx([5 - i / 10 for i in range(1, 21)])
    assert list(validated.get_xydata()[0]) == [0.02, 3.2] and validated.get_marker() == "o"
    assert judge(write("race", raced(3, "ab")), "--side", "a", "--plot", tmp_path / "y.png")[0] < 2
    styles = [line.get_linestyle() for line in figures[1].axes[0].lines if "n = 3" in str(line.get_label())]
    assert styles == ["-", "--"], "the base lies dashed over the other side"
    aimless = [log(3.2 + seed / 99, 9.0 + seed, start={"seed": seed, "target_val_loss": 0}) for seed in range(3)]
    status, _, err = judge(write("aimless", aimless), "--plot", tmp_path / "z.png")
    assert status == 0 and not err
    labels = [any("target" in str(line.get_label()) for line in found.axes[0].lines) for found in figures]
    assert labels == [True, True, False]


def test_text_that_no_terminal_shows(write, tmp_path):
    """A lone surrogate in a side's name, and a byte that is not UTF-8 in a path. The command works from any folder."""
    folder = write("odd", [content.replace('"side": "b"', '"side": "\\ud800"') for content in raced(9, "ab")])
    name = os.fsdecode(b"\xff")
    os.rename(folder, tmp_path / name)
    done = subprocess.run([sys.executable, str(RECORDS / "stats.py"), name, "--side", "a"], cwd=tmp_path,
                          capture_output=True, text=True, env={"PYTHONIOENCODING": "utf-8:strict"})
    assert done.returncode == 1 and not done.stderr and "\\ud" in done.stdout and "The claim does not hold" in done.stdout


def test_runs_that_cannot_be_judged_are_shown(write, judge):
    """One log gives no p, but its figures are printed, and every file that was left out is named."""
    folder = write("one", [log(3.2775, 140.9), "no log\n"])
    status, out, err = judge(folder)
    assert status == 2 and "needs at least 2 runs" in err
    assert "mean ± σ:     3.27750\n" in out and "140.9000 s" in out and "Left out:" in out and "1.txt: not a log" in out
    status, out, _ = judge("--json", folder)
    report = json.loads(out)
    assert status == 2 and report["runs"][0]["val_loss"] == 3.2775 and len(report["left_out"]) == 1


# Sets that differ

@pytest.mark.parametrize("change, says", [
    (lambda text: text.replace("H100 80GB HBM3 ", "A100-SXM4-80GB "), "different GPUs (NVIDIA H100"),
    (lambda text: text.replace("|   7  NVIDIA", "none"), "different numbers of GPUs (8 against 7)"),
    (lambda text: text.replace("source = ", "Driver Version: 570.1\n" + "=" * 100 + "\nimport a\nsource = "), ""),
    (lambda text: text.replace('"target_val_loss": 3.28', '"target_val_loss": 3.3'), "different targets (3.28 against 3.3)"),
    (lambda text: text.replace('"val_tokens": 100', '"val_tokens": 90'), "validated on different data (100 tokens against 90 tokens)")])
def test_no_verdict_compares_what_differs(write, refusal, judge, capsys, change, says):
    """Card, number of GPUs, target and validation data: neither stats.py nor verify.py calls a side faster or lower."""
    a, b = [write(name, (edit(log(loss, t + more, start={"target_val_loss": 3.28, "seed": i, "config": {"val_tokens": 100}}))
                         for i, (loss, t) in enumerate(zip(LOSSES, TIMES)))) for name, more, edit in (("a", 0, str), ("b", 1, change))]
    if says:
        assert says in refusal(a, "--vs", b)
        verify.main([a, "--vs", b])
        shown = " ".join(capsys.readouterr().out.split())
        assert f"Claim not judged: {verify.FASTER}: the sets hold runs " in shown and says in shown
        assert not re.search("Claim shown: faster|(?:lower|higher) by|compared with", shown)
    else:
        assert judge(a, "--vs", b)[0] == 0  # one side does not state its driver


def test_a_set_on_two_cards_is_warned_of_and_its_times_are_not_pooled(write, judge):
    contents = [log(loss, t) for loss, t in zip(LOSSES, TIMES)]
    folder = write("both", [*contents[:5], *(text.replace("H100 80GB HBM3 ", "H200           ") for text in contents[5:])])
    status, out, _ = judge(folder)
    assert status == 0 and "holds runs on different GPUs: NVIDIA H100 80GB HBM3, NVIDIA H200: its times" in out and "Time (" not in out


def test_a_declared_alpha_is_the_default_and_another_is_no_claim(write, judge):
    race = declare(write("race", raced(10)), n=10, alpha=0.02, sides={"": {"revision": None, "flags": []}})
    assert "at alpha 0.02; verify.py checks the rules." in judge(race)[1]
    status, out, _ = judge(race, "--alpha", 0.4)
    assert status == 2 and out.startswith("Not the declared claim: alpha 0.4, and race.jsonl declares 0.02") and "The claim holds" not in out


def test_where_the_loss_reached_the_target(new, judge):
    status, out, _ = judge(new, "--at-target", "--target", 7)
    assert status == 0 and "first at or below 7 at step 10.0 ± 0.0 (mean ± sd, n = 10)" in out and "at look 2" in out
    assert "This is no claim" in out
