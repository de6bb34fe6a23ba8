"""Train the small byte-level Qwen3-MoE model that the demo ships, and write its checkpoint folder.

The text is the Python standard library (demo_corpus.py): a token a byte, 0 between documents.

On CUDA weights, gradients and products are bfloat16, the dtype that ships; the optimiser steps
float32 copies, which are rounded back after every step. (Autocast would leave the experts in
float32: grouped_mm is not on its list.) On CPU training is float32 (7 times faster there than
bfloat16 without AMX) and rounded once at the end; the perplexities reported are always bfloat16's.

    L=.../lib/python3.11  # the standard library of CPython 3.11.7, with its tests
    T="python scripts/train_demo_model.py --corpus $L"
    $T --out first --minutes 2.75
    $T --out second --start-from first --steps 160 --batch 8 \\
        --peak-learning-rate 4e-4 --warmup-steps 10 --range-weight 3e-3
    $T --out trial --steps 9 --batch 2 --held-out-bytes 5000   # does every stage work?

The shipped model is `second`: `first` took 3 minutes on one H200, `second` 20 on a busy CPU. The
range penalty (activation_range.py) is there for the schemes with one scale per tensor, which cost
`first` 0.7 to 0.9 % of perplexity and `second` 0.3 %; it costs bfloat16 itself 2.3 %. Seeds are
fixed: the same --steps, text and machine give the same model but for the order in which CUDA adds.
training.json has the settings and losses of both runs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import platform
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from activation_range import RangePenalty
from demo_corpus import held_out_excerpts, read_corpus
from demo_scores import (
    as_tokens,
    as_windows,
    expert_load,
    perplexity,
    perplexity_without_experts,
    reload_and_continue,
)
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters; all of them land in training.json."""

    seed: int = 20261129
    batch: int = 128
    context: int = 512
    peak_learning_rate: float = 2e-3
    final_learning_rate: float = 5e-5
    warmup_steps: int = 200
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    router_aux_loss_coef: float = 0.01
    held_out_bytes: int = 160_000
    range_weight: float = 0.0  # of the penalty on rare large activations inside experts
    range_limit: float = 8.0  # the largest without a penalty, over their root mean square
    windows_between: int = 16  # of held-out text in the evaluations during training
    eval_batch: int = 32


@dataclass(frozen=True)
class Budget:
    """How long to train: a number of steps, or of seconds."""

    steps: int | None
    seconds: float | None

    def progress(self, *, step: int, elapsed: float) -> float:
        """Return the share of the budget used, from 0 to 1."""
        if self.steps is not None:
            return step / self.steps
        assert self.seconds is not None, "the parser asks for one of the two"
        return elapsed / self.seconds


def model_config(settings: Settings) -> Qwen3MoeConfig:
    """Describe the model: 2.9 million parameters, 2.4 of them in 4 x 16 experts, top-2."""
    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=384,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=settings.router_aux_loss_coef,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )


class MasterWeights:
    """AdamW on float32 copies of a bfloat16 model's parameters."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self.working = list(model.parameters())
        self.masters = [weight.detach().float().requires_grad_() for weight in self.working]
        decayed = [master for master in self.masters if master.dim() > 1]
        plain = [master for master in self.masters if master.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain}],
            lr=settings.peak_learning_rate,
            betas=settings.betas,
            weight_decay=0.0,
            fused=True,
        )
        self.clip_norm = settings.clip_norm

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Take the gradients, step the float32 copies, round them into the model."""
        for master, weight in zip(self.masters, self.working, strict=True):
            assert weight.grad is not None, "every weight takes part in the loss"
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        torch._foreach_copy_(self.working, self.masters)


def learning_rate(settings: Settings, *, step: int, progress: float) -> float:
    """Warm up linearly by steps, then follow a cosine over the budget."""
    warmup = min(1.0, (step + 1) / settings.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    span = settings.peak_learning_rate - settings.final_learning_rate
    return warmup * (settings.final_learning_rate + span * cosine)


def train(
    model: Qwen3MoeForCausalLM,
    stream: torch.Tensor,
    windows: torch.Tensor,
    settings: Settings,
    budget: Budget,
) -> dict[str, object]:
    """Train on random windows of stream; return the losses and what was measured on the way."""
    master = MasterWeights(model, settings)
    device = stream.device
    generator = torch.Generator(device=device).manual_seed(settings.seed)
    offsets = torch.arange(settings.context + 1, device=device)
    history: list[dict[str, float]] = []
    ranges = RangePenalty(model, limit=settings.range_limit) if settings.range_weight else None
    bar = tqdm(total=100, desc="train", unit="%", file=sys.stderr, mininterval=2.0)
    start, next_eval, step, loss_value = time.monotonic(), 0.125, 0, math.nan
    for step in itertools.count():
        elapsed = time.monotonic() - start
        progress = budget.progress(step=step, elapsed=elapsed)
        if progress >= 1.0:
            break
        starts = torch.randint(
            len(stream) - settings.context, (settings.batch, 1), generator=generator, device=device
        )
        rows = stream[starts + offsets]
        loss, aux_loss = next_byte_losses(model, rows)
        total = loss + settings.router_aux_loss_coef * aux_loss
        if ranges is not None:
            penalty = ranges.take()
            total = total + settings.range_weight * penalty
        total.backward()
        master.step(learning_rate(settings, step=step, progress=progress))
        if step % 20 == 0:  # waits for the device, so that the clock and the queue stay together
            loss_value = loss.item()
            if ranges is not None:
                tqdm.write(f"step {step}: range penalty {penalty.item():.4f}", file=sys.stderr)
            bar.n = min(100, round(100 * progress))
            bar.set_postfix(step=step, loss=f"{loss_value:.3f}")
        if progress >= next_eval:
            next_eval += 0.125
            held_out = perplexity(
                model, windows[: settings.windows_between], batch=settings.eval_batch
            )
            if ranges is not None:
                ranges.excesses.clear()
            history.append(
                {"step": step, "train_loss": loss_value, "held_out_perplexity": held_out}
            )
            tqdm.write(f"step {step}: held-out perplexity {held_out:.4f}", file=sys.stderr)
    bar.n = 100
    bar.close()
    if ranges is not None:
        ranges.remove()
    return {
        "steps": step,
        "seconds": round(time.monotonic() - start, 1),
        "bytes_seen": step * settings.batch * settings.context,
        "last_train_loss": loss_value,
        "history": history,
    }


def next_byte_losses(
    model: Qwen3MoeForCausalLM, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cross-entropy and load-balancing loss of int64 rows [batch, context + 1]."""
    output = model(input_ids=rows[:, :-1], use_cache=False, output_router_logits=True)
    logits = output.logits.float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
    return loss, output_aux_loss(model, output)


def output_aux_loss(model: Qwen3MoeForCausalLM, output: object) -> torch.Tensor:
    """Return Hugging Face's load-balancing loss of a forward pass that recorded router logits."""
    aux_loss = getattr(output, "aux_loss", None)
    if aux_loss is None:
        raise RuntimeError(
            f"{type(model).__name__} returned no aux_loss; output_router_logits was on"
        )
    assert isinstance(aux_loss, torch.Tensor)
    return aux_loss


def facts(device: torch.device) -> dict[str, object]:
    """Return what the run ran on."""
    hardware = platform.machine()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    return {
        "device": device.type,
        "hardware": hardware,
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def starting_model(folder: Path | None, settings: Settings) -> Qwen3MoeForCausalLM:
    """Return a fresh model, or the one to continue."""
    if folder is None:
        return Qwen3MoeForCausalLM(model_config(settings))
    return Qwen3MoeForCausalLM.from_pretrained(folder)


def earlier_report(folder: Path | None) -> dict[str, object] | None:
    """Return the training.json of the model that was continued."""
    if folder is None:
        return None
    report: dict[str, object] = json.loads((folder / "training.json").read_text())
    return report


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float)
    length.add_argument("--steps", type=int)
    parser.add_argument("--start-from", type=Path, help="checkpoint to continue, not a fresh model")
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--peak-learning-rate", type=float, default=Settings.peak_learning_rate)
    parser.add_argument("--warmup-steps", type=int, default=Settings.warmup_steps)
    parser.add_argument("--range-weight", type=float, default=Settings.range_weight)
    parser.add_argument("--held-out-bytes", type=int, default=Settings.held_out_bytes)
    parser.add_argument(
        "--experts", default="grouped_mm", help="experts_implementation to train with"
    )
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument(
        "--corpus-name", default=f"CPython {platform.python_version()} standard library"
    )
    return parser.parse_args()


def chosen_settings(arguments: argparse.Namespace) -> Settings:
    """Return the training settings with what the command line changes."""
    return Settings(
        batch=arguments.batch,
        held_out_bytes=arguments.held_out_bytes,
        peak_learning_rate=arguments.peak_learning_rate,
        warmup_steps=arguments.warmup_steps,
        range_weight=arguments.range_weight,
    )


def main() -> None:
    """Read the text, train, measure, save, and load again as a user would."""
    arguments = read_arguments()
    settings = chosen_settings(arguments)
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    budget = Budget(steps=arguments.steps, seconds=seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(settings.seed)

    documents = read_corpus(arguments.corpus)
    training = [document for document in documents if not document.held_out]
    excerpts = held_out_excerpts(documents, wanted=settings.held_out_bytes)
    text = b"\0".join(document.text for document in training)
    held_out = b"\n".join(document.text for document in excerpts)
    print(
        f"{len(training)} documents, {len(text)} bytes to train on; {len(held_out)} held out",
        flush=True,
    )
    windows = as_windows(held_out, settings.context, device)

    model = starting_model(arguments.start_from, settings)
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.set_experts_implementation(arguments.experts)
    model.train()
    measured = train(model, as_tokens(text, device), windows, settings, budget)
    model.to(torch.bfloat16)
    full = perplexity(model, windows, batch=settings.eval_batch)
    without = perplexity_without_experts(model, windows, batch=settings.eval_batch)
    model.eval()
    model.save_pretrained(arguments.out)
    (arguments.out / "held_out.txt").write_bytes(held_out)
    report = {
        "settings": asdict(settings),
        "facts": facts(device),
        "experts_implementation": arguments.experts,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "corpus": {
            "name": arguments.corpus_name,
            "training_bytes": len(text),
            "training_documents": len(training),
            "training_sha256": hashlib.sha256(text).hexdigest(),
            "held_out_bytes": len(held_out),
            "held_out_documents": [document.name for document in excerpts],
        },
        "training": measured,
        "started_from": earlier_report(arguments.start_from),
        "held_out_perplexity": full,
        "held_out_perplexity_with_experts_zeroed": without,
        "expert_load": expert_load(model, windows, batch=settings.eval_batch),
        "reloaded": reload_and_continue(
            arguments.out, b"import os\n\n\ndef read_lines(path", windows
        ),
    }
    (arguments.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in report if "perplexity" in key}), flush=True)


if __name__ == "__main__":
    main()
