"""Small real checkpoints and data files for the tests of evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from builders import byte_tokenizer, small_parts
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from evaluation.config import EvalConfig

WINDOW = 512


def recall_checkpoint(folder: Path) -> Path:
    """The tiny preset's architecture with random weights and its tokenizer of words, as a training saves it."""
    parts = small_parts()
    parts.lm.save_pretrained(folder)
    parts.tokenizer.save_pretrained(folder)
    return folder


def chat_checkpoint(folder: Path, seed: int = 0, window: int = WINDOW, hidden: int = 32, heads: int = 4) -> Path:
    """A Llama of random weights over bytes, with a chat template and a context window of so many tokens."""
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=window,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_smollm2(smollm2: Path, folder: Path) -> Path:
    """SmolLM2's tokenizer, chat template and architecture with few weights, which are random."""
    config = AutoConfig.from_pretrained(smollm2)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config.update({"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **heads})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return folder


def problems_file(folder: Path, count: int = 3) -> Path:
    """Problems in the schema of the mathematics sets."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sums.jsonl"
    rows = [{"id": n, "problem": f"What is {n} + {n}?", "answer": 2 * n} for n in range(1, count + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def recall_config(checkpoint: Path, output: Path, **changes: Any) -> EvalConfig:
    """Four recall documents under the settings that the checkpoint's tokenizer knows the words of."""
    agent = {"template": "words", "chunk_tokens": 10, "max_question_tokens": 8, "max_memory_tokens": 3}
    values: dict[str, Any] = {
        "model_path": str(checkpoint),
        "output_path": str(output),
        "data_names": ["recall@2"],
        "num_questions": 4,
        "n_sampling": 2,
        "cache_dir": str(output / "cache"),
        "agent": {**agent, "max_final_tokens": 4},
        "task": {"num_keys": 16, "num_values": 96, "facts_per_chunk": 2, "filler_per_chunk": 4},
    }
    return EvalConfig.model_validate(values | changes)


def problems_config(checkpoint: Path, data: Path, output: Path, **changes: Any) -> EvalConfig:
    """Problems with short answers."""
    values: dict[str, Any] = {
        "model_path": str(checkpoint),
        "output_path": str(output),
        "data_names": [str(data)],
        "n_sampling": 2,
        "max_gen_tokens": 8,
        "cache_dir": str(output / "cache"),
        "grading_workers": 1,
    }
    return EvalConfig.model_validate(values | changes)
