"""Quantising while loading never holds much more than the int8 model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import COMMON, build_model

CODE = """
import sys, threading, time
import torch, transformers
from int8moe_compile.hf import Int8MoeConfig

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024

def load(directory):
    kind = transformers.Qwen3MoeForCausalLM
    return kind.from_pretrained(directory, quantization_config=Int8MoeConfig())

load(sys.argv[1])  # so that everything is imported
start, peak, done = resident(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
model = load(sys.argv[2])
done = True
thread.join()
state = model.state_dict().values()
print(sum(value.nbytes for value in state), peak - start)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_is_the_int8_model_and_one_fused_tensor(tmp_path: Path):
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 64}
    config = transformers.Qwen3MoeConfig(
        **{**COMMON, **sizes, "num_hidden_layers": 4, "head_dim": 16}
    )
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    build_model("qwen3_moe").save_pretrained(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "tiny"), str(tmp_path / "model")],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    total, peak = map(int, done.stdout.split()[-2:])
    fused = 64 * 2 * 256 * 512 * 2
    assert 90e6 < total < 120e6
    # The model itself has to show, or nothing was measured.
    assert 0.5 * total < peak <= 1.1 * (total + fused)
