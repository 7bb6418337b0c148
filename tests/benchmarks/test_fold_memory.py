"""The benchmark of memory on a long protein measures one and the same step, however many ranks take it."""

import pytest


@pytest.mark.long
def test_loss_and_gradients_in_float64(script):
    benchmark = script("memory")
    one, four = (benchmark.measure("dsp", ranks, 46, 6, "float64") for ranks in (1, 4))  # 12, 12, 12 and 10 residues
    assert len(four["ranks"]) == 4
    for rank in four["ranks"]:
        assert abs(rank["loss"] - one["ranks"][0]["loss"]) < 1e-12
        assert rank["bytes"] > 0
    assert benchmark.furthest(four["gradients"], one["gradients"]) < 1e-10
