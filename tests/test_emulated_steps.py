"""Whole training steps on the emulated GPU against the CPU path: slow, so that pytest gives them
their own process."""

import re

import pytest

from test_emulated_gpu import emulated, passes  # noqa: F401, a fixture


@pytest.mark.parametrize("preset", ["speedrun", "frontier", "frontier89", "laptop"])
def test_two_steps(emulated, preset):
    passes(emulated("--compare", preset, "--steps", "2"))


def test_a_step_in_bf16_and_fp8_with_flash_attention(emulated):
    passes(
        emulated(
            "--compare",
            "frontier89",
            "--dtype",
            "bfloat16",
            "--steps",
            "1",
            "--",
            "--attention",
            "flash",
        )
    )


def test_exact_mode_has_the_same_bits_on_two_ranks(emulated):
    done = [
        emulated(
            "--compare",
            "laptop",
            "--steps",
            "1",
            "--ranks",
            ranks,
            "--",
            "--world_size_invariant",
            "true",
        )
        for ranks in "12"
    ]
    assert [each.returncode for each in done] == [0, 0], done
    alone, two = (re.search("bits (.*)", each.stdout)[1] for each in done)
    assert alone == two
