"""SmolLM2-135M-Instruct, really downloaded and converted: it loads, keeps its chat template and still knows things."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.assets import resolve_model

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def model_and_tokenizer(smollm2_path: Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(smollm2_path)


def greedy(model, tokenizer, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_folder_is_a_complete_checkpoint(smollm2_path: Path) -> None:
    assert resolve_model("smollm2-135m") == smollm2_path
    config = json.loads((smollm2_path / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert (smollm2_path / "model.safetensors").stat().st_size < 280e6


def test_chat_template_and_special_tokens_came_through(model_and_tokenizer) -> None:
    _, tokenizer = model_and_tokenizer
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]) == 1
    text = "naïve café, 1984:\n\tthe \\boxed{answer} 東京"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_it_knows_the_capital_of_france(model_and_tokenizer) -> None:
    model, tokenizer = model_and_tokenizer
    assert greedy(model, tokenizer, "The capital of France is").strip().startswith("Paris")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    assert greedy(model, tokenizer, chat) == "The capital of France is Paris."


def test_a_second_get_keeps_the_verified_copy(smollm2_path: Path) -> None:
    before = (smollm2_path / "model.safetensors").stat().st_mtime_ns
    command = [sys.executable, "-m", "clusterkit.cli.main", "assets", "get", "smollm2-135m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "is there already, unchanged" in done.stdout
    assert (smollm2_path / "model.safetensors").stat().st_mtime_ns == before
