"""GGUF to a Hugging Face folder, on a model of a few thousand parameters that is written here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.convert import convert_gguf, find_gguf
from trainer.errors import RunError, UserError

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
HIDDEN, INNER, HEADS, LAYERS = 32, 64, 2, 2


def vocabulary() -> list[str]:
    """Every byte in the notation of byte-level BPE (GPT-2), one merge, and an end token."""
    from tokenizers.pre_tokenizers import ByteLevel  # noqa: PLC0415

    return [*sorted(ByteLevel.alphabet()), "th", "<|end|>"]


def write_gguf(file: Path, leave_out: str = "") -> Path:
    """A Llama-type model with random weights."""
    words = vocabulary()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([1] * (len(words) - 1) + [3])
    writer.add_token_merges(["t h"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id, writer.add_pad_token_id):
        add(len(words) - 1)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(words), HIDDEN), "output_norm": (HIDDEN,)}
    key_width = HIDDEN // HEADS
    for n in range(LAYERS):
        shapes |= {f"blk.{n}.attn_norm": (HIDDEN,), f"blk.{n}.ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{n}.attn_q": (HIDDEN, HIDDEN), f"blk.{n}.attn_output": (HIDDEN, HIDDEN)}
        shapes |= {f"blk.{n}.attn_k": (key_width, HIDDEN), f"blk.{n}.attn_v": (key_width, HIDDEN)}
        shapes |= {f"blk.{n}.ffn_gate": (INNER, HIDDEN), f"blk.{n}.ffn_up": (INNER, HIDDEN)}
        shapes |= {f"blk.{n}.ffn_down": (HIDDEN, INNER)}
    for name, shape in shapes.items():
        if name != leave_out:
            writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32) / 8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_converted_folder_loads_as_a_checkpoint(tmp_path: Path) -> None:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    write_gguf(tmp_path / "tiny.gguf")
    summary = convert_gguf(tmp_path, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert summary["architecture"] == "LlamaForCausalLM"
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|user|>hi"
    assert tokenizer.decode(tokenizer("the café")["input_ids"]) == "the café"
    # The last table of embeddings is stored in the order of the vocabulary, so a row must come through as it went in.
    source = np.random.default_rng(0).standard_normal((len(vocabulary()), HIDDEN)).astype(np.float32) / 8
    assert torch.equal(model.get_input_embeddings().weight, torch.from_numpy(source).to(torch.bfloat16))


def test_command_line(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainer.convert", "gguf", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    file = write_gguf(tmp_path / "tiny.gguf")
    done = run(str(file), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert '"chat_template": true' in done.stdout
    again = run(str(file), str(tmp_path / "out"))
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    assert "Traceback" not in again.stderr


def test_truncated_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"tiny\.gguf cannot be read as a GGUF checkpoint"):
        convert_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_file_without_one_of_the_weights(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", leave_out="blk.1.ffn_up")
    with pytest.raises(UserError, match=r"does not fill the model: missing .*layers\.1\.mlp\.up_proj"):
        convert_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_full_disk_while_weights_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SafetensorError(Exception):
        """What safetensors raises: no OSError."""

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(RunError, match=f"no space left on the disk of {tmp_path}:"):
        convert_gguf(tmp_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_which_file_is_meant(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        find_gguf(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"exactly one \.gguf file \(found: none\)"):
        find_gguf(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert find_gguf(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"no")
    with pytest.raises(UserError, match=r"found: a\.gguf, b\.gguf"):
        find_gguf(tmp_path)
    with pytest.raises(UserError, match="is no GGUF file"):
        find_gguf(tmp_path / "b.gguf")
