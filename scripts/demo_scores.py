"""Measure the demo's model: perplexity per byte, what its experts are worth, how they are used."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM


def as_tokens(text: bytes, device: torch.device) -> torch.Tensor:
    """Turn bytes into token ids."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long()


def as_windows(text: bytes, context: int, device: torch.device) -> torch.Tensor:
    """Cut text into rows [W, context + 1] that overlap by the one byte both predict from."""
    tokens = as_tokens(text, device)
    return tokens.unfold(0, context + 1, context).contiguous()


@torch.no_grad()
def perplexity(model: Qwen3MoeForCausalLM, windows: torch.Tensor, *, batch: int) -> float:
    """Return the perplexity per byte of windows [W, context + 1], each predicted by itself."""
    total = 0.0
    model.eval()
    for rows in windows.split(batch):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
        )
        total += loss.item()
    model.train()
    return math.exp(total / windows[:, 1:].numel())


def perplexity_without_experts(
    model: Qwen3MoeForCausalLM, windows: torch.Tensor, *, batch: int
) -> float:
    """Return the perplexity with every expert's output zeroed: what the experts are worth."""
    kept = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("experts.down_proj"):
                kept[name] = weight.clone()
                weight.zero_()
        result = perplexity(model, windows, batch=batch)
        for name, weight in model.named_parameters():
            if name in kept:
                weight.copy_(kept[name])
    return result


@torch.no_grad()
def expert_load(
    model: Qwen3MoeForCausalLM, windows: torch.Tensor, *, batch: int
) -> list[list[float]]:
    """Return each layer's share of contributions per expert over one batch of held-out text."""
    output = model(input_ids=windows[:batch, :-1], use_cache=False, output_router_logits=True)
    shares = []
    for logits in output.router_logits:
        chosen = logits.topk(model.config.num_experts_per_tok, dim=-1).indices.flatten()
        counts = torch.bincount(chosen, minlength=model.config.num_experts).float()
        shares.append([round(share, 4) for share in (counts / counts.sum()).tolist()])
    return shares


def reload_and_continue(folder: Path, prompt: bytes, windows: torch.Tensor) -> dict[str, object]:
    """Load the checkpoint as a user would and continue a prompt, on CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = as_tokens(prompt, torch.device("cpu"))[None]
    new = model.generate(ids, max_new_tokens=120, do_sample=False)[0, ids.shape[1] :]
    return {
        "dtype": str(model.dtype),
        "held_out_perplexity_of_4_windows": perplexity(model, windows[:4].cpu(), batch=4),
        "prompt": prompt.decode(),
        "continuation": bytes(new.tolist()).decode(errors="replace"),
    }
