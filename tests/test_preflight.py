"""Each part of a run beside its plain form: what is broken is caught, and what does without it is taken, by all ranks."""

import dataclasses

import pytest
import torch

import train_gpt
from test_run import flags, read_log, run_here

CPU = torch.device("cpu")


class Said(list):
    say = list.append


def trainer_of(config, comm=None, **changes):
    changes = {"layers": "- S0M LM M", "backout_layer": 2, "bucket_mb": 1.0, **changes}
    config = dataclasses.replace(config, **changes)
    return train_gpt.Trainer(config, comm or train_gpt.Comm(), CPU, train_gpt.find_shards(config.train_files))


@pytest.fixture
def config(tiny, corpus):
    return dataclasses.replace(tiny, **corpus)


def failed(rows):
    return {row[0] for row in rows if row[-1] != "ok"}


def test_what_is_whole_passes_and_leaves_no_trace(config):
    trainer, said = trainer_of(config, ngrams="2:32:8"), Said()
    before = trainer.state_hash()
    rows, broken = train_gpt.preflight(trainer, said)
    assert trainer.state_hash() == before and broken is None and not said
    assert [row[0] for row in rows[:5]] == ["attention", "block 3 M", "block 2 LM", "block 1 S0M", "head"]
    assert {row[0].split()[0] for row in rows[5:]} == {"Adam", "NorMuon", "load"} and not failed(rows)
    assert all(float(row[2]) <= float(row[3]) and float(row[4]) > 0 for row in rows)
    assert float(rows[0][2]) > 0, "attention was compared with itself"
    train_gpt.preflight(trainer_of(config, ngrams="2:32:8", preflight="only"), said)
    assert len(said) == 1 + len(rows) and said[0].split() == ["part", "how", "difference", "allowed", "ms", "verdict"]


def test_the_parts_of_frontier_pass(config):
    frontier = train_gpt.PRESETS["frontier"]
    changes = {name: getattr(frontier, name) for name in ("layers", "backout_layer", "value_gates", "skip_gates", "sublayer_scales",
                                                          "pairing", "key_offset", "ngram_mix", "muon_qk_heads")}
    rows, _ = train_gpt.preflight(trainer_of(config, ngrams="2:32:8", num_heads=4, head_dim=8, **changes), Said())
    assert {row[0].split()[2] for row in rows if row[0].startswith("block")} == {*frontier.layers.split()}
    assert len({row[0] for row in rows}) == len(rows)
    assert not failed(rows)


def break_attention(monkeypatch):
    """But for masks that reach as far as any window."""
    whole = train_gpt.GPT.masks
    monkeypatch.setattr(train_gpt.GPT, "masks", lambda model, x, windows: whole(
        model, x, windows if model.reach else train_gpt.Windows(windows.long // 2, windows.short // 2)))


def break_fp8(monkeypatch):
    whole = train_gpt.fp8_product
    monkeypatch.setattr(train_gpt, "fp8_product", lambda *args, **settings: 1.2 * whole(*args, **settings))


def break_kernel(monkeypatch):
    whole = train_gpt.relu_squared
    monkeypatch.setattr(train_gpt, "relu_squared", lambda a, b, h=None: whole(a, b) if h is None else 1.1 * whole(a, b, h))


def break_compiled(monkeypatch, owner, result):
    """As a compiler would that gets the code of one class wrong."""
    def compile(function, **_):
        broken = function.__qualname__.startswith(owner)
        return (lambda *args: result(function, args)) if broken else function
    monkeypatch.setattr(torch, "compile", compile)


def no_kernel(function, args):
    raise RuntimeError("no kernel image is available\nfor this device")


def only_decays(function, args):
    param, grad, state, hyper = args
    function(param, 0 * grad, state, hyper)


COMPILED = {"compile": "on"}


@pytest.mark.parametrize("break_it, changes, part, instead", [
    (break_attention, {}, "attention", ("attention", "masked")),
    (break_fp8, {"fp8_head": True}, "head", ("fp8_head", False)),
    (break_kernel, {"kernels": "on"}, "block 3 M", ("kernels", "off")),
    (lambda m: break_compiled(m, "Block", lambda f, args: 1.1 * f(*args)), COMPILED, "block 3 M", ("compile", "off")),
    (lambda m: break_compiled(m, "Head", no_kernel), COMPILED, "head", ("compile", "off")),
    (lambda m: break_compiled(m, "Head", lambda f, args: 0 * f(*args)), COMPILED, "head", ("compile", "off")),
    (lambda m: break_compiled(m, "Head", lambda f, args: torch.nan * f(*args)), COMPILED, "head", ("compile", "off")),
    (lambda m: break_compiled(m, "Adam", only_decays), COMPILED, "Adam [", ("compile", "off")),
    (lambda m: break_compiled(m, "NorMuon", only_decays), COMPILED, "NorMuon [", ("compile", "off")),
])
def test_a_broken_part_is_caught_and_names_what_does_without_it(config, monkeypatch, break_it, changes, part, instead):
    break_it(monkeypatch)
    trainer, said = trainer_of(config, **changes), Said()
    before = trainer.state_hash()
    rows, broken = train_gpt.preflight(trainer, said)
    assert broken.name.startswith(part) and broken.fallback == instead and trainer.state_hash() == before
    assert len(said) == 1 + len(rows) and broken.name in failed(rows)
    name, value = instead
    rows, broken = train_gpt.preflight(trainer_of(config, **{**changes, name: value}), said)
    assert broken is None and not failed(rows), "the fallback does not do without it"


def test_what_a_compiler_says_stands_in_the_table(config, monkeypatch):
    break_compiled(monkeypatch, "Head", no_kernel)
    rows, _ = train_gpt.preflight(trainer_of(config, **COMPILED), Said())
    assert [row[-1] for row in rows if row[0] == "head"] == ["failed: RuntimeError: no kernel image is available"]


def test_a_plain_form_that_fails_is_no_fault_of_the_part(config, monkeypatch):
    """In float32 and uncompiled it wants more memory than the run."""
    whole = train_gpt.attend

    def attend(q, k, v, mask):
        if torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(q, k, v, mask)
    monkeypatch.setattr(train_gpt, "attend", attend)
    said = Said()
    rows, broken = train_gpt.preflight(trainer_of(config), said)
    assert broken is None and len(said) == 1 + len(rows)
    assert {row[0] for row in rows if row[2] == "-"} == failed(rows) == {"attention", "block 2 LM", "block 1 S0M"}
    assert {row[-1] for row in rows if row[2] == "-"} == {"not compared: OutOfMemoryError: CUDA out of memory"}


def test_a_shard_that_reads_wrongly_stops_the_run(config, monkeypatch):
    whole = train_gpt.load_tokens
    trainer = trainer_of(config)
    monkeypatch.setattr(train_gpt, "load_tokens", lambda shard: whole(shard)[::-1])
    with pytest.raises(train_gpt.RunError, match=r"preflight: load a shard, 6,000 tokens, failed as the table says"):
        train_gpt.preflight(trainer, Said())


def deaf(comm, which):
    """Its rank 1 sums, or gathers, without what the others sent."""
    if comm.rank == 1 and which == "all-gather":
        comm.all_gather = lambda full, shard: comm.exchange([shard, shard], torch.empty(2, len(shard), dtype=shard.dtype))
    if comm.rank == 1 and which == "reduce-scatter":
        comm.reduce_scatter = lambda shard, full, received: train_gpt.HandleGroup(comm.exchange(
            full.view(2, -1), [*received, full.view(2, -1)[1]]), then=lambda: shard.copy_(full.view(2, -1)[1]))
    return comm


def beside_a_broken_rank(comm, config, which):
    """What preflight says on each rank where one is broken."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if which == "attention" and comm.rank == 1:
            break_attention(monkeypatch)
        trainer = trainer_of(config, deaf(comm, which))
        rows, broken = train_gpt.preflight(trainer, Said())
    return [row[0] for row in rows[-4:]], failed(rows), broken and broken.fallback


def test_all_ranks_take_the_fallback_that_one_needs(config, on_ranks):
    exchanged = ["load a shard", "all-reduce", "reduce-scatter", "all-gather"]
    assert on_ranks(2, beside_a_broken_rank, config, "none") == [(exchanged, set(), None)] * 2
    assert on_ranks(2, beside_a_broken_rank, config, "attention") == [
        (exchanged, {"attention", "block 2 LM", "block 1 S0M"}, ("attention", "masked"))] * 2


def test_a_collective_that_sums_wrongly_stops_all_ranks(config, on_ranks):
    for which in ("reduce-scatter", "all-gather"):
        with pytest.raises(train_gpt.RunError, match=f"preflight: {which}, .* KiB, failed as the table says"):
            on_ranks(2, beside_a_broken_rank, config, which)


def with_rows(comm, config, whole):
    """Tables whose rows travel, perhaps by a network that loses their values."""
    if not whole:
        exchange = comm.exchange
        comm.exchange = lambda sent, received: exchange(
            [x * 0 if x.is_floating_point() and rank != comm.rank else x for rank, x in enumerate(sent)], received)
    trainer, said = trainer_of(config, comm, ngrams="2:5000:8 3:70:8", lazy_tables=True), Said()
    before = trainer.state_hash()
    rows, broken = train_gpt.preflight(trainer, said)
    assert broken is None and trainer.state_hash() == before
    return [row[0] for row in rows if "rows" in row[0]]


def test_rows_are_sent_and_come_back(config, on_ranks):
    assert on_ranks(2, with_rows, config, True) == [["rows to their owners, to all"]] * 2
    with pytest.raises(train_gpt.RunError, match="rows to their owners, to all, .* KiB, failed as the table says"):
        on_ranks(2, with_rows, config, False)


def test_a_run_names_its_fallback_in_the_log(tmp_path, corpus, capsys, monkeypatch):
    break_fp8(monkeypatch)
    short = dict(num_steps=3, stages="until long_window; 1 3", warmup_steps=1, fp8_head="true", preflight="on", run_id="a")
    status, out, errors = run_here(flags(tmp_path, corpus, **short), capsys)
    start = read_log(tmp_path / "logs" / "a.txt")[2]
    change = "preflight: head, fp8, failed: --fp8_head false in its place"
    assert status == 0 and start["changes"] == [change] and change in out, errors
    assert start["config"]["fp8_head"] is False and failed(start["preflight"]) == {"head"}
    assert [row[1] for row in start["preflight"] if row[0] == "head"] == ["fp8", "uncompiled"]
    assert read_log(tmp_path / "logs" / "a.txt")[4]["seconds_outside_clock"]["preflight"] > 0


def test_what_takes_its_place_is_fitted_to_the_gpus_again(config, monkeypatch):
    """Masks in pieces, or what is not compiled, take more memory."""
    fitted, part = [], train_gpt.Part("attention", "FlexAttention", lambda plain: [], 0.06, ("attention", "masked"))

    def fit(wanted, vocab_size, comm):
        fitted.append(wanted.attention)
        return dataclasses.replace(wanted, micro_batch_tokens=wanted.micro_batch_tokens // 2), [f"fit {len(fitted)}"]
    verdicts, built = [part, None], []
    monkeypatch.setattr(train_gpt, "fit_to_gpus", fit)
    monkeypatch.setattr(train_gpt, "preflight", lambda trainer, log: ([], verdicts.pop(0)))
    whole = train_gpt.Trainer

    def trainer(wanted, comm, device, shards, asked):
        built.append((wanted.micro_batch_tokens, asked.micro_batch_tokens))
        return whole(dataclasses.replace(wanted, attention="auto"), comm, CPU, shards, asked)
    monkeypatch.setattr(train_gpt, "Trainer", trainer)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    config = dataclasses.replace(config, preflight="only", attention="flex")
    train_gpt.run(config, "a", train_gpt.Comm(), torch.device("cuda"), Said(), 0.0)
    tokens = config.micro_batch_tokens
    assert fitted == ["flex", "masked"] and built == [(tokens // 2, tokens)] * 2 and not verdicts


def test_the_bare_flag_prints_a_table_and_makes_no_run(tmp_path, corpus, capsys):
    status, out, errors = run_here([*flags(tmp_path, corpus), "--preflight"], capsys)
    assert status == 0 and out.startswith("part ") and out.count(" ok\n") == len(out.splitlines()) - 1, errors
    assert not (tmp_path / "logs").exists()
