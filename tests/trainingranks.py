"""What every rank of the GPU tests runs: the same steps on any number of GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trainer.config import RunConfig
from trainer.config_parts import ModelConfig
from trainer.train import attention
from trainer.train.distributed import World, join_world, leave_world, single_world, whole
from trainer.train.learner import Learner
from trainer.train.loading import open_checkpoint
from trainer.train.model import prepare_lm
from trainer.types import Row

VOCABULARY = 4096


def make_lm(device: torch.device, layers: int = 4, heads: int = 8) -> Any:
    """A Qwen2 with grouped heads, of 64 or, where there are 4, of 128; random weights spread enough for sharp
    distributions.
    """
    torch.manual_seed(5)
    lm = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            initializer_range=0.05,
            tie_word_embeddings=True,
            attn_implementation=attention.IMPLEMENTATION,
        )
    )
    return prepare_lm(lm).to(device)


def make_rows(count: int = 24, seed: int = 0) -> list[Row]:
    """Rows of 20 to 900 tokens; the last tenth of each is trained on."""
    generator = torch.Generator().manual_seed(seed)
    rows, total = [], 0
    for number in range(count):
        length = int(torch.randint(20, 900, (1,), generator=generator))
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        response = max(2, length // 10)
        total += response
        sign = 1.0 if number % 2 else -1.0
        rows.append(Row(ids[:-response], ids[-response:], [-8.3] * response, sign, 1.0, number))
    for row in rows:
        row.weight = 1.0 / total
    return rows


def make_groups(seed: int = 0) -> list[Row]:
    """The same number of tokens and the like in groups: four rows of each begin alike for 100 to 700 tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    rows = make_rows(24, seed)
    for first in range(0, len(rows), 4):
        length = int(torch.randint(100, 700, (1,), generator=generator))
        prefix = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        for row in rows[first : first + 4]:
            row.prompt_ids = prefix + row.prompt_ids
    return rows


def make_config(dtype: str, **train: Any) -> RunConfig:
    """compiled only where asked; micro-batches of at most 4096 tokens; gradients as they are."""
    checkpointing = train.pop("checkpointing", "none")
    limits = {"chunk_tokens": 16, "max_question_tokens": 4, "max_memory_tokens": 4, "max_final_tokens": 5}
    return RunConfig.model_validate(
        {
            "model": {"dtype": dtype, "gradient_checkpointing": checkpointing},
            "algorithm": {"clip_low": 1.0, "clip_high": 1e9},
            "agent": {"template": "words", **limits},
            "train": {"compile": False, "max_tokens_per_mb": 4096, "warmup_steps": 0, "grad_clip": 1e9, **train},
        }
    )


def make_learner(dtype: str, world: World | None = None, heads: int = 8, **train: Any) -> Learner:
    world = world or single_world(dtype=getattr(torch, dtype))
    return Learner(make_lm(world.device, heads=heads), make_config(dtype, **train), world, 100)


def run(world: World, dtype: str) -> dict[str, Any]:
    """Two steps of a nearly linear optimizer, and the log-probs after them."""
    one = make_learner(dtype, world, eps=1.0, learning_rate=0.1)
    stats = [one.step(make_rows(seed=seed)).values for seed in (0, 1)]
    logprobs = one.logprobs(make_rows(seed=0))
    parameters = {n: whole(p).cpu() for n, p in one.policy.lm.named_parameters()}
    return {"stats": stats, "logprobs": logprobs, "parameters": parameters}


def loads_its_part(world: World, dtype: str, folder: Path) -> bool:
    """Whether a model that the ranks read from its files in parts has the values of the whole one, and trains."""
    lm, weights = open_checkpoint(folder, ModelConfig())
    one = Learner(lm, make_config(dtype), world, 100, weights)
    expected = dict(make_lm(torch.device("cpu")).named_parameters())
    same = all(torch.equal(whole(p).cpu(), expected[n].detach()) for n, p in one.policy.lm.named_parameters())
    return same and one.step(make_rows()).stepped


def main(rank: int, size: int, tensor: int, dtype: str, folder: Path) -> None:
    """Entry point of a rank's process. The folder `model` in `folder` holds what `make_lm` makes."""
    world = join_world(rank, size, f"file://{folder}/rendezvous", dtype=getattr(torch, dtype), tensor=tensor)
    found = run(world, dtype) | {"loaded": loads_its_part(world, dtype, folder / "model")}
    torch.save(found, folder / f"rank{rank}.pt")
    leave_world(world)
