"""The tiny model for examples: built from nothing, with the words of the examples as its vocabulary."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.paths import cache_folder
from trainer.seeding import derive_seed
from trainer.staging import staged_folder
from trainer.tasks.examples import load_examples
from trainer.warmup import tiny

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
    key = json.dumps([config.model.model_dump(), config.seed, words], sort_keys=True)
    folder = cache_folder(config) / "untrained" / hashlib.sha256(key.encode()).hexdigest()[:20]
    if not (folder / "config.json").exists():
        tokenizer = tiny.make_tokenizer(words)
        lm = tiny.make_lm(config.model, tokenizer, derive_seed(config.seed, "init", 0) % 2**31)
        with staged_folder(folder, replace=True) as staging:
            lm.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
    return folder
