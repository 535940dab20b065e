"""Replicas that are sharded over two ranks, or over two pairs that share layers, do what one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
import shardedranks
import torch
from builders import learner, parameters, small_config
from forkserver import run_ranks

from trainer.checkpoint.recover import RecoverStore
from trainer.train.distributed import single_world


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.long)])
def test_replicas_make_the_steps_of_one_rank_and_stay_equal(tmp_path: Path, size: int) -> None:
    told = run_ranks(shardedranks.main, size, tmp_path)

    lm = shardedranks.model()
    config = small_config(*shardedranks.SETTINGS)
    one = learner(lm, config, single_world())
    start, batches = {n: p.clone() for n, p in parameters(one).items()}, shardedranks.batches(lm)
    stats = [one.step(rows).values for rows in batches]
    expected = parameters(one)
    assert max(float((expected[n] - start[n]).abs().max()) for n in start) > 1e-3
    served = told[0]["replicas"]["served"]
    assert served.keys() == expected.keys()
    assert all(torch.equal(served[n], told[0]["replicas"]["parameters"][n]) for n in served)
    for rank, its in enumerate(told):
        found = its["replicas"]
        assert max(float((found["parameters"][n] - expected[n]).abs().max()) for n in expected) <= 1e-6
        assert all(torch.equal(found["resumed"][n], found["parameters"][n]) for n in expected)
        for mine, ones in zip(found["stats"], stats, strict=True):
            for key in ("grad_norm", "actor_loss", "entropy", "trained_tokens", "trained_rows"):
                assert mine[key] == pytest.approx(ones[key], rel=1e-4, abs=1e-6), key
        twin = told[rank % (size // 2)]["replicas"]  # the same place in the first replica
        assert all(torch.equal(found["own"][n], twin["own"][n]) for n in found["own"])
        assert found["digest"] == twin["digest"]
        tensor = shardedranks.REPLICAS[size][0]
        assert {whole / own for whole, own in found["tokens"]} == {tensor}

    # What they wrote after two steps, one rank goes on from.
    slot, problems = RecoverStore(tmp_path / "replicas").newest()
    assert slot is not None, problems
    again = learner(lm, config, single_world())
    RecoverStore(tmp_path / "replicas").load(again, slot)
    again.step(batches[2])
    assert max(float((parameters(again)[n] - expected[n]).abs().max()) for n in expected) <= 1e-6
