"""Low-rank adapters on one rank, against the base model, against merged weights and against PEFT."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shardedranks
import torch
from builders import (
    byte_tokenizer,
    gradients,
    grouped_query_lm,
    learner,
    parameters,
    plain_copy,
    relative_difference,
    sampled_rows,
    small_config,
)
from realparts import require
from safetensors import SafetensorError
from torch import Tensor

from evaluation.steps import checkpoint_sha256
from trainer.adapter_folder import CONFIG, INSIDE
from trainer.assets import adapter_base, resolve_model
from trainer.checkpoint.export import export
from trainer.checkpoint.recover import RecoverStore, RunState
from trainer.config_parts import ModelConfig
from trainer.engines.embedded import EmbeddedEngine
from trainer.errors import RunError, UserError
from trainer.train import adapterfiles, chunks
from trainer.train.adapterfiles import whole_model
from trainer.train.distributed import single_world
from trainer.train.learner import Learner
from trainer.train.lora import BasePolicy, add_adapters, is_adapter, split_state
from trainer.train.model import load_lm
from trainer.types import Row, SamplingParams

SETTINGS = ("model.lora.rank=4", "model.lora.alpha=8", "train.grad_clip=1e9", "train.max_tokens_per_mb=64")


def adapted(base: Any, *settings: str, moved: bool = True) -> Any:
    """The model with adapters; moved: as if they had learned something."""
    lora = small_config(*SETTINGS, *settings).model.lora
    lm = add_adapters(copy.deepcopy(base), lora, torch.float32, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in lm.named_parameters():
        if moved and name.endswith("lora_B.weight"):
            torch.nn.init.normal_(parameter, 0, 0.05, generator=generator)
    return lm


def merged(lm: Any) -> dict[str, Tensor]:
    weights, adapters = split_state(lm, lm.state_dict())
    return weights | {name: adapter.merged(weights[name]) for name, adapter in adapters.items()}


@pytest.fixture(scope="module")
def base() -> Any:
    return grouped_query_lm()


@pytest.fixture(scope="module")
def rows(base: Any) -> list[Row]:
    return sampled_rows(base, 9, base.config.vocab_size)


@pytest.fixture
def folder(base: Any, tmp_path: Path) -> Path:
    base.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_new_adapters_change_nothing(base: Any, rows: list[Row]) -> None:
    found = learner(adapted(base, moved=False), small_config(*SETTINGS)).logprobs(rows)

    assert found == learner(base, small_config(*SETTINGS)).logprobs(rows)


def test_merged_weights_compute_what_adapters_do(base: Any, rows: list[Row]) -> None:
    lm = adapted(base)
    whole = copy.deepcopy(base)
    whole.load_state_dict(merged(lm))

    found = learner(lm, small_config(*SETTINGS)).logprobs(rows)
    expected = learner(whole, small_config(*SETTINGS)).logprobs(rows)

    assert found != learner(base, small_config(*SETTINGS)).logprobs(rows)
    for mine, its in zip(found, expected, strict=True):
        assert mine == pytest.approx(its, abs=1e-5)


def test_only_adapters_learn_and_the_base_is_their_reference(base: Any, rows: list[Row]) -> None:
    one = learner(adapted(base), small_config(*SETTINGS))
    before, reference = parameters(one), learner(base, small_config(*SETTINGS)).logprobs(rows)

    one.step(rows)

    changed = {name for name, value in parameters(one).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if is_adapter(name)}
    assert one.logprobs(rows, BasePolicy(one.policy)) == reference
    assert one.logprobs(rows) != reference


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full", "chunked"])
def test_gradients_are_those_of_the_merged_weights(
    base: Any, rows: list[Row], checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the chain rule: of W = W0 + s B A, dA = s Bᵀ dW and dB = s dW Aᵀ."""
    monkeypatch.setattr(chunks, "CHUNK", 16)
    lm, settings = adapted(base), (*SETTINGS, f"model.gradient_checkpointing={checkpointing}")
    whole = copy.deepcopy(base)
    whole.load_state_dict(merged(lm))
    of_weights, _ = gradients(learner(whole, small_config(*settings)), rows)

    found, _ = gradients(learner(lm, small_config(*settings)), rows)

    expected = {}
    _, adapters = split_state(lm, lm.state_dict())
    for name, one in adapters.items():
        layer = name.removesuffix(".weight")
        expected[f"{layer}.lora_A.weight"] = one.scale * one.b.T @ of_weights[name]
        expected[f"{layer}.lora_B.weight"] = one.scale * of_weights[name] @ one.a.T
    assert relative_difference({n: g for n, g in found.items() if is_adapter(n)}, expected) <= 1e-4


def test_bfloat16_has_float32_adapters_on_a_bfloat16_base(base: Any, rows: list[Row]) -> None:
    config = small_config(*SETTINGS, "model.dtype=bfloat16")
    lm = add_adapters(copy.deepcopy(base), config.model.lora, torch.bfloat16, seed=1)
    one = learner(lm, config, single_world(dtype=torch.bfloat16))
    expected, _ = gradients(learner(adapted(base, moved=False), small_config(*SETTINGS)), rows)

    found, _ = gradients(one, rows)

    assert {p.dtype for n, p in one.policy.named_parameters() if is_adapter(n)} == {torch.float32}
    assert {p.dtype for n, p in one.policy.named_parameters() if not is_adapter(n)} == {torch.bfloat16}
    own = {n: g for n, g in found.items() if is_adapter(n)}
    assert relative_difference(own, {n: expected[n] for n in own}) <= 0.06  # bfloat16 has 8 bits


def test_layers_are_chosen_by_name(base: Any) -> None:
    lm = adapted(base, "model.lora.targets=[q_proj,v_proj]")

    assert {name.split(".")[-3] for name, _ in lm.named_parameters() if is_adapter(name)} == {"q_proj", "v_proj"}
    with pytest.raises(UserError, match=r"no linear layer nope: choose among down_proj, gate_proj"):
        adapted(base, "model.lora.targets=nope")


# -- on disk ------------------------------------------------------------------------------------------------------


def exported(folder: Path, place: Path, *settings: str) -> tuple[Any, Learner]:
    """A checkpoint of adapters on the model of a folder."""
    config = small_config(*SETTINGS, *settings)
    lm = adapted(load_lm(folder, ModelConfig(), torch.float32))
    one = Learner(lm, config, single_world(), 10)
    export(one, byte_tokenizer(), place)
    return lm, one


def test_a_checkpoint_is_the_whole_model_with_its_adapter_inside(folder: Path, tmp_path: Path) -> None:
    lm, _ = exported(folder, tmp_path / "checkpoint")

    whole = load_lm(tmp_path / "checkpoint", ModelConfig(), torch.float32)

    expected = merged(lm)
    assert all(torch.equal(value, expected[name]) for name, value in whole.state_dict().items())
    inside = resolve_model(str(tmp_path / "checkpoint" / INSIDE))
    again = load_lm(whole_model(inside, str(tmp_path / "cache")), ModelConfig(), torch.float32)
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("merged", ["true", "false"])
def test_a_checkpoint_leaves_a_base_at_rest_where_it_is(
    folder: Path, tmp_path: Path, merged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "wake", lambda *_, **__: pytest.fail("the base was brought back to the GPU"))

    exported(folder, tmp_path / "checkpoint", f"checkpoint.merged={merged}")


def test_a_checkpoint_of_the_adapter_alone_is_used_as_a_model(folder: Path, tmp_path: Path) -> None:
    lm, _ = exported(folder, tmp_path / "checkpoint", "checkpoint.merged=false")
    adapter = tmp_path / "checkpoint"
    assert sum(file.stat().st_size for file in adapter.glob("*.safetensors")) < 40_000

    whole = whole_model(resolve_model(str(adapter)), str(tmp_path / "cache"))

    assert whole == whole_model(adapter, str(tmp_path / "cache"))  # made once
    found = load_lm(whole, ModelConfig(), torch.float32).state_dict()
    assert all(torch.equal(found[name], value) for name, value in merged(lm).items())
    greedy = [([5, 6, 7], SamplingParams(8, 0.0))]
    assert (
        EmbeddedEngine(load_lm(whole, ModelConfig()), {0}).generate_batch(greedy)[0].token_ids
        == EmbeddedEngine(lm, {0}).generate_batch(greedy)[0].token_ids
    )


def test_the_base_of_a_relative_path_is_found_from_everywhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exported(Path(folder.name), tmp_path / "checkpoint", "checkpoint.merged=false")

    monkeypatch.chdir("/")

    assert adapter_base(tmp_path / "checkpoint") == folder


def test_processes_that_merge_the_same_adapter_get_one_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(folder, tmp_path / "checkpoint", "checkpoint.merged=false")
    adapter, merge, found = tmp_path / "checkpoint", adapterfiles._merge, list[Path]()

    def slower(*arguments: Any) -> None:
        monkeypatch.setattr(adapterfiles, "_merge", merge)
        found.append(whole_model(adapter, str(tmp_path / "cache")))  # another process, in the meantime
        merge(*arguments)

    monkeypatch.setattr(adapterfiles, "_merge", slower)

    assert [whole_model(adapter, str(tmp_path / "cache"))] == found
    assert list((tmp_path / "cache" / "merged").iterdir()) == found


def test_a_merged_model_follows_its_adapter_and_goes_when_nobody_uses_it(folder: Path, tmp_path: Path) -> None:
    exported(folder, tmp_path / "checkpoint", "checkpoint.merged=false")
    adapter, cache = tmp_path / "checkpoint", str(tmp_path / "cache")
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    begun_with = whole_model(adapter, cache, run="one/trial")

    def unused(merged: Path, days: float) -> None:
        at = time.time() - days * 86400
        os.utime(merged / adapterfiles.MADE_OF, (at, at))

    def edit(text: str) -> Path:
        (adapter / "chat_template.jinja").write_text(text)
        merged = whole_model(adapter, cache)
        assert (merged / "chat_template.jinja").read_text() == text
        return merged

    first, second = edit("one"), whole_model(other, cache)
    for merged, days in ((begun_with, 99), (first, 0.5), (second, 2)):
        unused(merged, days)
    before = checkpoint_sha256(adapter)
    third = edit("two")
    assert checkpoint_sha256(adapter) != before  # answers are kept by it
    assert all(path.is_dir() for path in (begun_with, first, second, third))
    unused(first, 1.1)
    unused(second, 31)
    assert whole_model(adapter, cache) == third
    assert sorted((tmp_path / "cache" / "merged").iterdir()) == sorted([begun_with, third])


def test_in_somebody_elses_cache_a_run_gets_a_merged_model_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(folder, tmp_path / "checkpoint", "checkpoint.merged=false")
    adapter, cache = tmp_path / "checkpoint", str(tmp_path / "cache")
    theirs, utime = whole_model(adapter, cache), os.utime

    def refused(path: Path, *rest: Any) -> None:  # tests may run as root, whom no file refuses
        if path.parent == theirs:
            raise PermissionError(path)
        utime(path, *rest)

    monkeypatch.setattr(os, "utime", refused)
    left = theirs.with_name(f"{adapterfiles.UNUSED}1-old")
    left.mkdir()

    assert whole_model(adapter, cache) == theirs  # to be read now
    own = whole_model(adapter, cache, run="one/trial")

    assert own != theirs
    assert (own / adapterfiles.RUN).read_text() == "one/trial\n"
    assert sorted((tmp_path / "cache" / "merged").iterdir()) == sorted([own, theirs])


def test_a_merge_that_fails_is_told_in_words_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(folder, tmp_path / "checkpoint", "checkpoint.merged=false")
    adapter, shard = tmp_path / "checkpoint", folder / "model.safetensors"

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(adapterfiles, "save_file", full)
        with pytest.raises(RunError, match=r"no space left on the disk of .*merged"):
            whole_model(adapter, str(tmp_path / "cache"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"model.safetensors is cut short"):
        whole_model(adapter, str(tmp_path / "cache"))
    assert not list((tmp_path / "cache" / "merged").iterdir())


def test_an_adapter_that_cannot_be_used_says_why(folder: Path, tmp_path: Path) -> None:
    exported(folder, tmp_path / "checkpoint", "checkpoint.merged=false")
    adapter, config = tmp_path / "checkpoint", tmp_path / "checkpoint" / CONFIG
    facts = json.loads(config.read_text())

    config.write_text(json.dumps(facts | {"base_model_name_or_path": "nobody/nothing"}))
    with pytest.raises(UserError, match="an adapter of the model nobody/nothing: it is not here"):
        resolve_model(str(adapter))
    config.write_text(json.dumps(facts | {"use_dora": True}))
    with pytest.raises(UserError, match="use_dora=True is not known here"):
        resolve_model(str(adapter))
    config.write_text(json.dumps(facts | {"init_lora_weights": "pissa_niter_4"}))
    with pytest.raises(UserError, match="init_lora_weights=pissa_niter_4 is not known here"):
        resolve_model(str(adapter))
    config.write_text(json.dumps(facts | {"alpha_pattern": {"q_proj(": 3}}))
    with pytest.raises(UserError, match="does not describe a LoRA adapter"):
        resolve_model(str(adapter))
    config.write_text(json.dumps(facts | {"base_model_name_or_path": str(adapter)}))
    with pytest.raises(UserError, match=r"is an adapter of .*checkpoint, which is an adapter, too"):
        resolve_model(str(adapter))
    config.write_text(json.dumps(facts))
    whole = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(whole) | {"quantization_config": {"bits": 4}}))
    with pytest.raises(UserError, match="whose weights are quantised"):
        resolve_model(str(adapter))
    (folder / "config.json").write_text(whole)
    shardedranks.model().save_pretrained(folder)
    config.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"does not belong to .*: by the adapter model.layers.* is \[\d+, 64\], and"):
        whole_model(adapter, str(tmp_path / "cache"))


def test_adapters_are_not_put_on_another_base(base: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, same = (learner(adapted(base), small_config(*SETTINGS)) for _ in range(2))
    RecoverStore(tmp_path).save(one, RunState(1, 1, 1, 1, 0.0), {}, single_world())
    slot, _ = RecoverStore(tmp_path).newest()
    assert slot is not None
    changed = copy.deepcopy(base)
    with torch.no_grad():
        changed.model.norm.weight[0] *= 1 + 2**-20
    other = learner(adapted(changed), small_config(*SETTINGS))

    RecoverStore(tmp_path).load(same, slot)
    assert "does not say" not in caplog.text
    with pytest.raises(UserError, match=r"the adapters of .*slot-a belong to another base model: .* or start afresh"):
        RecoverStore(tmp_path).load(other, slot)
    RecoverStore(tmp_path).load(other, replace(slot, base=""))
    assert "does not say which base model its adapters belong to" in caplog.text


# -- PEFT's own ---------------------------------------------------------------------------------------------------


@pytest.fixture
def peft_model(folder: Path, tmp_path: Path) -> Any:
    """PEFT's model over the base, with the adapter that was exported."""
    require(importlib.util.find_spec("peft") is not None, "PEFT is not installed")
    from peft import PeftModel  # noqa: PLC0415 (may be missing)

    exported(folder, tmp_path / "checkpoint", "checkpoint.merged=false")
    plain = plain_copy(load_lm(folder, ModelConfig(), torch.float32), torch.float32)
    return PeftModel.from_pretrained(plain, tmp_path / "checkpoint", is_trainable=True)


def test_peft_loads_an_adapter_and_computes_the_same_gradients(
    folder: Path, peft_model: Any, rows: list[Row], tmp_path: Path
) -> None:
    lm = adapted(load_lm(folder, ModelConfig(), torch.float32))
    unclipped = ("algorithm.clip_low=1.0", "algorithm.clip_high=1e9", "algorithm.dual_clip=1e9")
    found, stats = gradients(learner(lm, small_config(*SETTINGS, *unclipped)), rows)

    loss = torch.zeros(())
    for row in rows:
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        logp = torch.log_softmax(peft_model(ids).logits[0].float(), -1)[len(row.prompt_ids) - 1 : -1]
        own = logp.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
        ratio = (own - torch.tensor(row.behave_logprobs)).exp()
        loss = loss - row.weight * row.advantage * ratio.sum()
    loss.backward()

    its = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in peft_model.named_parameters()
        if p.grad is not None
    }
    own = {name: value for name, value in found.items() if is_adapter(name)}
    assert stats.values["actor_clip_ratio"] == 0
    assert relative_difference(own, its) <= 1e-4


def test_patterns_are_those_of_peft(folder: Path, tmp_path: Path) -> None:
    require(importlib.util.find_spec("peft") is not None, "PEFT is not installed")
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 (may be missing)

    plain = plain_copy(load_lm(folder, ModelConfig(), torch.float32), torch.float32)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, use_rslora=True,
        rank_pattern={r"layers\.0\..*q_proj": 2, "v_proj": 3}, alpha_pattern={r".*\.1\.self_attn\.[qk]_proj": 5},
    )  # fmt: skip
    model = get_peft_model(plain, config)
    model.save_pretrained(tmp_path / "theirs")
    facts = json.loads((tmp_path / "theirs" / CONFIG).read_text())
    (tmp_path / "theirs" / CONFIG).write_text(json.dumps(facts | {"base_model_name_or_path": str(folder)}))

    found = load_lm(whole_model(tmp_path / "theirs", str(tmp_path / "cache")), ModelConfig(), torch.float32)

    its = model.merge_and_unload().state_dict()
    assert all(torch.allclose(value, its[name], atol=1e-6) for name, value in found.state_dict().items())


def test_an_adapter_of_peft_is_merged_as_peft_merges_it(folder: Path, peft_model: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.5)
    peft_model.save_pretrained(tmp_path / "theirs")

    found = load_lm(whole_model(tmp_path / "theirs", str(tmp_path / "cache")), ModelConfig(), torch.float32)

    its = peft_model.merge_and_unload().state_dict()
    assert all(torch.allclose(value, its[name], atol=1e-6) for name, value in found.state_dict().items())
