"""A whole run whose server shares the trainer's GPU: who has the memory when, and what the server holds at the end.

The server is the stand-in of tests/weightserver.py, and the GPU is the CPU: SGLang's memory saver needs a GPU, and
tests/gpu/test_weights.py shows it there. The run, its learner at rest, the publisher and all calls are real.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from builders import small_config, small_parts
from coin import FOLDER
from publishing import Servers, digest_of, folder_tensors, save_model, servers

from trainer.base_run import Attempt
from trainer.checkpoint.start import Start
from trainer.loop import TrainingRun
from trainer.metrics import Monitor
from trainer.paths import RunPaths
from trainer.serving import registry
from trainer.train.distributed import single_world

STEPS = 3
SETTINGS = ("n_gpus_per_node=1", "allocation_mode=sglang:d1|fsdp:d1", "servers.engine=sglang", "train.offload=true")
SETTINGS += ("model.dtype=bfloat16", f"train.total_steps={STEPS}", "reward.name=coin:Coin", f"code_dir={FOLDER}")
SETTINGS += ("eval.every_steps=0", "train.learning_rate=0.01")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Servers]:
    folder = save_model("llama", tmp_path / "model")
    small_parts().tokenizer.save_pretrained(folder)
    with servers(folder) as found:
        yield found


def test_server_and_trainer_take_turns_and_agree_at_the_end(rig: Servers, tmp_path: Path) -> None:
    config = small_config(*SETTINGS, f"fileroot={tmp_path / 'runs'}")
    paths, server = RunPaths.of(config), rig.start()
    paths.logs.mkdir(parents=True)
    node = registry.Registration(server.name, "sglang", "", os.uname().nodename, 1, time.time(), "ready", server.url)
    registry.write(registry.folder_of(paths.logs), node)
    start = digest_of(folder_tensors(rig.folder))

    TrainingRun(Attempt(config, rig.folder, single_world(), Monitor(paths.logs, 1), lambda: False, Start(None))).run()

    state = rig.state(server)
    (checkpoint,) = paths.checkpoints.iterdir()
    trained = {name: tensor.to(torch.bfloat16) for name, tensor in folder_tensors(checkpoint).items()}
    assert state["digest"] == digest_of(trained) != start
    calls = state["calls"]
    memory = [path for path in calls if "memory_occupation" in path or path == "/update_weights_from_tensor"]
    turn = ["/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_tensor"]
    assert memory == [*turn, "/resume_memory_occupation"] * STEPS
    asleep = False
    for before, path in pairwise(calls):
        if path == "/release_memory_occupation":
            assert before == "/flush_cache"  # SGLang ends itself if it is not idle to the last
            asleep = True
        elif path == "/resume_memory_occupation":
            asleep = False
        assert not (asleep and path == "/generate")
    assert calls[-1] == "/generate"  # the evaluation after the last step
