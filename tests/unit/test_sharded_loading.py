"""Ranks read their own parts of a model from its files: the same values as of a model that was loaded whole and shared
out then, in a fraction of the memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loadingranks
import pytest
import shardedranks
import torch
from builders import grouped_query_lm, small_config, small_parts
from forkserver import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trainer.config_parts import ModelConfig
from trainer.errors import UserError
from trainer.train.distributed import single_world
from trainer.train.loading import Origin, fill, open_checkpoint
from trainer.train.model import load_lm
from trainer.train.weightfiles import WeightFiles, WholeWeights

# name -> the model, how it is kept: one file or several, float32 or bfloat16
MODELS = ("llama_tied_one_file", "qwen2_several_files_bf16", "qwen3_uneven_tied")
CPU = torch.device("cpu")
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip


def small_lm(tied: bool = False) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied))


def save(name: str, folder: Path) -> Path:
    if name == "llama_tied_one_file":
        small_parts().lm.save_pretrained(folder / name)
    elif name == "qwen3_uneven_tied":
        shardedranks.model().save_pretrained(folder / name)
    else:
        grouped_query_lm().to(torch.bfloat16).save_pretrained(folder / name, max_shard_size="20KB")
        assert len(list((folder / name).glob("*.safetensors"))) > 3
    return folder / name


def large_model(folder: Path) -> Path:
    """A hundred million parameters in bfloat16, in files of 32 MB."""
    config = Qwen2Config(
        vocab_size=8192, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=True, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        lm = Qwen2ForCausalLM(config)
    lm = lm.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(lm.parameters()):
            parameter.fill_(1 / (number + 1))
    lm.tie_weights()
    lm.save_pretrained(folder, max_shard_size="32MB")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(name, root) for name in MODELS}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> list[dict[str, Any]]:
    """What each of two processes reports."""
    large = large_model(tmp_path_factory.mktemp("large"))
    return run_ranks(loadingranks.main, 2, tmp_path_factory.mktemp("ranks"), list(folders.values()), large)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def check(told: dict[str, Any], folder: Path, dtype: torch.dtype) -> None:
    """A rank's report against the model as transformers loads it."""
    lm = load_lm(folder, ModelConfig(), torch.float32)
    expected = {n: p.detach() for n, p in lm.named_parameters()}
    cast = {n: p.to(dtype) for n, p in expected.items()}
    rotary = {n: b.detach() for n, b in lm.named_buffers()}
    assert told["same shards"]
    assert same(told["parameters"], expected)
    assert same({n.removeprefix("lm."): b for n, b in told["buffers"].items()}, rotary)
    assert same(told["replica"], cast)
    assert same(told["replica buffers"], rotary)
    assert same(told["reference"], cast)
    assert told["tied"] is lm.config.tie_word_embeddings
    assert told["reference logprobs"] == told["logprobs"]
    mine, its = told["stats"]
    assert mine == its
    assert mine["grad_norm"] > 0
    assert same(told["moved"], told["moved whole"])
    assert not same(told["moved"], expected)


@pytest.mark.parametrize("world", sorted(loadingranks.WORLDS))
@pytest.mark.parametrize("model", MODELS)
def test_ranks_hold_what_a_whole_model_would_give_them(
    model: str, world: str, two_ranks: list[dict[str, Any]], folders: dict[str, Path]
) -> None:
    for told in two_ranks:
        check(told[f"{model}: {world}"], folders[model], loadingranks.WORLDS[world][1])


def test_layers_shared_by_two_and_sharded_over_two(tmp_path: Path, folders: dict[str, Path]) -> None:
    models = [folders[name] for name in ("llama_tied_one_file", "qwen3_uneven_tied")]
    for told in run_ranks(loadingranks.main, 4, tmp_path, models, None):
        for folder in models:
            check(told[f"{folder.name}: both"], folder, torch.float32)


def test_a_rank_never_holds_the_whole_model(two_ranks: list[dict[str, Any]]) -> None:
    for told in two_ranks:
        memory = told["memory"]
        weights = memory["weights"]
        assert weights > 350e6
        assert memory["whole"] > weights  # the measurement sees what is there
        assert memory["in parts"] < 0.7 * weights


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_with_master_weights(model: str, folders: dict[str, Path]) -> None:
    told = loadingranks.load(single_world(dtype=torch.bfloat16), folders[model])
    check(told, folders[model], torch.bfloat16)


def test_one_rank_without_a_mesh_trains_what_transformers_loads(folders: dict[str, Path]) -> None:
    origin = Origin(folders["llama_tied_one_file"], small_config(), single_world())
    assert origin.weights is None
    assert origin.replica() is origin.lm
    expected = load_lm(folders["llama_tied_one_file"], ModelConfig(), torch.float32)
    assert same(dict(origin.lm.named_parameters()), dict(expected.named_parameters()))


def test_names_and_formats_that_only_transformers_knows(tmp_path: Path) -> None:
    lm = small_lm()
    tensors = {name.removeprefix("model."): t for name, t in lm.state_dict().items()}  # as of the model without a head
    lm.save_pretrained(tmp_path / "bare")
    save_file(tensors, tmp_path / "bare" / "model.safetensors", {"format": "pt"})
    lm.save_pretrained(tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save(lm.state_dict(), tmp_path / "old" / "pytorch_model.bin")

    for name in ("bare", "old"):
        empty, weights = open_checkpoint(tmp_path / name, ModelConfig())
        assert isinstance(weights, WholeWeights)
        fill(empty, weights, CPU)
        assert same(dict(empty.named_parameters()), dict(lm.named_parameters()))


def test_a_head_that_is_tied_by_name_only(tmp_path: Path) -> None:
    lm = small_lm(tied=True)
    lm.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]

    # Kept twice, the same: one weight. Kept twice, and different: transformers takes them for two, and so is done here.
    for head, tied in ((embedding.clone(), True), (embedding + 1, False)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
        empty, weights = open_checkpoint(tmp_path, ModelConfig())
        assert isinstance(weights, WeightFiles)
        fill(empty, weights, CPU)
        assert (empty.lm_head.weight is empty.model.embed_tokens.weight) is tied
        expected = load_lm(tmp_path, ModelConfig(), torch.float32)
        assert same(dict(empty.named_parameters()), dict(expected.named_parameters()))

    # Kept under the head's name alone.
    rest = {name: t for name, t in tensors.items() if name != "model.embed_tokens.weight"}
    save_file(rest | {"lm_head.weight": embedding}, tmp_path / "model.safetensors", {"format": "pt"})
    empty, weights = open_checkpoint(tmp_path, ModelConfig())
    fill(empty, weights, CPU)
    assert torch.equal(empty.model.embed_tokens.weight, embedding)
    assert empty.lm_head.weight is empty.model.embed_tokens.weight


def test_a_folder_that_lacks_a_file_or_an_end(tmp_path: Path) -> None:
    small_lm().save_pretrained(tmp_path, max_shard_size="10KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    content = files[1].read_bytes()
    files[1].write_bytes(content[:-7])
    with pytest.raises(UserError, match=rf"{files[1].name} is cut short: {len(content) - 7} of {len(content)} bytes"):
        open_checkpoint(tmp_path, ModelConfig())
    files[1].unlink()
    with pytest.raises(UserError, match=f"cannot be loaded as a causal language model: .*{files[1].name}"):
        open_checkpoint(tmp_path, ModelConfig())
