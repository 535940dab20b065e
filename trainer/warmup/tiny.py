"""The tiny model and its tokenizer: a Llama architecture (with attention biases) built from nothing.

Its attention starts with an inductive bias instead of pure noise. From random weights a small transformer spends most
of its training on a plateau before it discovers the induction circuit (Olsson et al. 2022, "In-context learning and
induction heads"): one head looks at the token before, a later head looks for earlier places that follow the same
token. Head geometry can be chosen at initialisation (Trockman & Kolter 2023, "Mimetic initialization of
self-attention layers"), so here

* two heads of the first layer start out looking one and two tokens back (position only, through the query and key
  biases and the fast rotary frequencies), and write what they see into a subspace of their own;
* the heads of the second layer start out matching their token against that subspace, and copy.

Embeddings, feed-forward layers, all other heads and later layers start random. Nothing about the task's words, the
prompts or the memory is put in; the circuit is blunt (it puts about 15 % of its attention on the right place) until it
is trained.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer.config import RunConfig
from trainer.config_parts import ModelConfig
from trainer.errors import UserError
from trainer.paths import cache_folder
from trainer.seeding import derive_seed
from trainer.staging import staged_folder
from trainer.tasks.examples import load_examples
from trainer.train import attention
from trainer.train.model import prepare_lm

PAD, EOS = "<pad>", "<eos>"
PROMPT_WORDS = ("<u>", "<a>", "question", "?", "memory", "section", "update", "answer", "\\boxed{", "}")
EMBEDDING_STD = 0.05
ROPE_THETA = 10_000.0
FAST, SLOW = 0.2, 1 / 40  # rotary frequencies, radians per token: used for positions, and for matching content


def make_tokenizer(vocabulary: list[str]) -> Any:
    """Word-level tokenizer: one word, one token; saved and loaded like any Hugging Face tokenizer."""
    words = list(dict.fromkeys([PAD, EOS, *PROMPT_WORDS, *vocabulary]))
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token=PAD)


def make_lm(config: ModelConfig, tokenizer: Any, seed: int) -> Any:
    """Freshly initialised tiny model. The same seed gives the same weights."""
    tiny = config.tiny
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=tiny.hidden_size,
                num_hidden_layers=tiny.num_layers,
                num_attention_heads=tiny.num_heads,
                num_key_value_heads=tiny.num_heads,
                intermediate_size=tiny.intermediate_size,
                max_position_embeddings=tiny.max_position_embeddings,
                rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
                initializer_range=EMBEDDING_STD,
                tie_word_embeddings=True,
                attention_bias=True,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                attn_implementation=attention.IMPLEMENTATION,
            )
        )
        _induction_prior(lm)
    return prepare_lm(lm)


@torch.no_grad()
def _induction_prior(lm: Any) -> None:
    width = lm.config.hidden_size
    heads = lm.config.num_attention_heads
    dim = width // heads
    frequency = ROPE_THETA ** -(torch.arange(0, dim, 2) / dim)
    slow = torch.where(frequency < SLOW)[0]
    matching = torch.cat([slow, slow + dim // 2])
    first, second = lm.model.layers[0].self_attn, lm.model.layers[1].self_attn
    for layer in lm.model.layers:
        # Feed-forward outputs start small, so that they do not drown what the heads carry.
        layer.mlp.down_proj.weight.mul_(0.1)
    gain = EMBEDDING_STD * (width / dim) ** 0.5  # a copied token arrives as loud as an embedding
    for back in (1, 2):
        head = slice((back - 1) * dim, back * dim)
        read, write = _orthonormal(width, dim), _orthonormal(width, dim)
        _look_back(first, head, frequency, back)
        first.v_proj.weight[head] = read
        first.o_proj.weight[:, head] = write.T * gain
        followers = range(heads - 1) if back == 1 else (heads - 1,)
        for number in followers:
            rows = slice(number * dim, (number + 1) * dim)
            for projection, basis in ((second.q_proj, read), (second.k_proj, write)):
                weight = torch.zeros(dim, width)
                weight[matching] = 1.4 * basis[: len(matching)]
                projection.weight[rows] = weight
            copy = _orthonormal(width, dim)
            second.v_proj.weight[rows] = copy
            second.o_proj.weight[:, rows] = copy.T * gain


def _orthonormal(width: int, rows: int) -> Tensor:
    """[rows, width] with orthonormal rows."""
    return torch.linalg.qr(torch.randn(width, width))[0][:rows]


def _look_back(layer: Any, head: slice, frequency: Tensor, tokens: int, sharpness: float = 6.0) -> None:
    """Let a head attend `tokens` positions back whatever the content: constant query and key, rotated apart by that
    distance, on the frequencies that turn fast enough to tell neighbours apart.
    """
    half = len(frequency)
    amplitude = sharpness * (frequency > FAST).float()
    layer.q_proj.weight[head].normal_(0, 0.005)
    layer.k_proj.weight[head].normal_(0, 0.005)
    query, key = layer.q_proj.bias[head], layer.k_proj.bias[head]
    query[:half], query[half:] = amplitude, 0.0
    key[:half], key[half:] = amplitude * torch.cos(frequency * tokens), amplitude * torch.sin(frequency * tokens)


MOST_WORDS = 20_000


def untrained_model(config: RunConfig) -> Path:
    """Folder of a fresh tiny model in the cache (Hugging Face format); the same settings and words give the same one.

    Raises:
        UserError: the examples cannot be read, or have more words than a tiny model can know.
    """
    examples = load_examples(config.examples)
    texts = (text for e in [*examples.train, *examples.heldout] for _, text in e.messages)
    words = sorted({word for text in texts for word in text.split()})
    if len(words) > MOST_WORDS:
        raise UserError(
            f"{examples.path} has {len(words)} different words and a model built from nothing learns at most "
            f"{MOST_WORDS}: use a checkpoint with model.path, such as --preset 135M_cpu"
        )
    key = json.dumps([config.model.model_dump(exclude={"lora"}), config.seed, words], sort_keys=True)
    folder = cache_folder(config) / "untrained" / hashlib.sha256(key.encode()).hexdigest()[:20]
    if not (folder / "config.json").exists():
        tokenizer = make_tokenizer(words)
        lm = make_lm(config.model, tokenizer, derive_seed(config.seed, "init", 0) % 2**31)
        with staged_folder(folder, replace=True) as staging:
            lm.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
    return folder
