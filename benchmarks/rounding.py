"""How far apart log-probs of one bfloat16 model are when nothing differs but the order in which products are summed.

    python3 benchmarks/rounding.py MODEL [--responses 16] [--tokens 256] [--quantised]

What a server and a trainer can agree on at best, each with kernels of its own: both round every layer's results to
bfloat16, and sums in another order round to another neighbour here and there, which the layers after it carry on. The
model writes --responses texts at temperature 1; then its distributions at every position are compared, two at a time:
`f32` (float32), `bf16` (transformers' own), `halves` (every matrix product the sum of two halves, added in float32 and
rounded once, as exact as the other). With --quantised also `int8` and `nf4`: `bf16` with the weights of its linear
layers rounded to int8 by rows, or to NF4 in blocks of 64 with scales that are quantised, too (by bitsandbytes): what a
quantised base would be apart from servers that sample with the weights in bfloat16. Printed, one JSON object a line:
`logp`, the mean over positions of Σ p |Δ log p|, and `kl`, both in nats.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

PLAIN = nn.Linear.forward


def halves(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer as the sum of two halves: [..., in] -> [..., out] in the dtype of x."""
    middle = x.shape[-1] // 2
    weight = layer.weight.float()
    total = x[..., :middle].float() @ weight[:, :middle].t() + x[..., middle:].float() @ weight[:, middle:].t()
    return (total if layer.bias is None else total + layer.bias.float()).to(x.dtype)


@torch.no_grad()
def logprobs(lm: Any, ids: Tensor) -> Tensor:
    """[texts, tokens] -> [texts, tokens, vocabulary] float32; the output layer is computed in float32."""
    hidden = lm.model(ids).last_hidden_state
    return torch.log_softmax(hidden.float() @ lm.lm_head.weight.float().t(), -1)


def quantised(lm: Any, kind: str) -> Any:
    """Round the weights of all linear layers but the output's in place to what quantised ones are computed with."""
    for layer in lm.model.modules():
        if not isinstance(layer, nn.Linear):
            continue
        weight = layer.weight.data
        if kind == "int8":
            scale = weight.float().abs().amax(1, keepdim=True) / 127
            weight = (weight.float() / scale).round() * scale
        else:
            from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # noqa: PLC0415

            weight = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4", compress_statistics=True))
        layer.weight.data = weight.to(layer.weight.dtype)
    return lm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a causal language model")
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--quantised", action="store_true", help="needs bitsandbytes")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(given.model)

    def load(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(device).eval()

    exact = load(torch.float32)
    torch.manual_seed(0)
    chat = [{"role": "user", "content": "Tell a story about a river, a mill and a letter that came too late."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer([text] * given.responses, return_tensors="pt", add_special_tokens=False).to(device)
    length = {"min_new_tokens": given.tokens, "max_new_tokens": given.tokens}
    ids = exact.generate(**prompt, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **length)
    start = prompt["input_ids"].shape[1] - 1
    found = {"f32": logprobs(exact, ids)[:, start:-1]}
    rounded = load(torch.bfloat16)
    found["bf16"] = logprobs(rounded, ids)[:, start:-1]
    nn.Linear.forward = halves  # type: ignore[method-assign]
    found["halves"] = logprobs(rounded, ids)[:, start:-1]
    nn.Linear.forward = PLAIN  # type: ignore[method-assign]
    for kind in ("int8", "nf4") if given.quantised else ():
        found[kind] = logprobs(quantised(load(torch.bfloat16), kind), ids)[:, start:-1]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(json.dumps({"device": name, "torch": torch.__version__, "tokens": given.responses * given.tokens}))
    for one, other in combinations(found, 2):
        gap = found[one] - found[other]
        p = found[one].exp()
        logp, kl = (p * gap.abs()).sum(-1).mean(), (p * gap).sum(-1).mean()
        print(json.dumps({"of": one, "and": other, "logp": round(float(logp), 5), "kl": round(float(kl), 6)}))


if __name__ == "__main__":
    main()
