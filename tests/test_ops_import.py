"""Import the operators in fresh processes: twice is once, registering twice is loud."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import sys, torch
import int8moe_compile
import int8moe_compile as again
from int8moe_compile.ops import experts, dequantize
assert again is int8moe_compile and experts is torch.ops.int8moe.experts
assert not {"triton", "transformers"} & {name.split(".")[0] for name in sys.modules}, "heavy import"
meta = torch.ones(2, 3, 4, dtype=torch.int8, device="meta")
assert dequantize(meta, torch.ones(2, 1, device="meta"), dtype=torch.half).shape == (2, 3, 4)
x = torch.ones(1, 2)
w = torch.ones(1, 2, 2, dtype=torch.int8)
s = torch.ones(1, 1)
out = experts(x, w, s, w[:, :, :1], s, x[:, :1], torch.zeros(1, 1, dtype=torch.int64),
              activation_quant="none", activation="relu")
print("COMPUTES:", out.tolist())
try:
    torch.library.Library("int8moe", "DEF").define("experts(Tensor x) -> Tensor")
except RuntimeError as error:
    print("DEFINED TWICE:", "int8moe" in str(error))
for name in [name for name in sys.modules if name.startswith("int8moe_compile")]:
    del sys.modules[name]
try:
    import int8moe_compile
except RuntimeError as error:
    print("IMPORTED TWICE:", "int8moe" in str(error))
"""


def test_a_fresh_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "COMPUTES: [[4.0, 4.0]]",
        "DEFINED TWICE: True",
        "IMPORTED TWICE: True",
    ]
