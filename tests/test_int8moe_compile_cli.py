"""The command line: what the parser takes, refuses and runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from int8moe_compile import cli, demo


def test_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[demo.Options] = []
    monkeypatch.setattr(demo, "run", ran.append)
    assert cli.main(["demo", "--device", "cpu"]) == 0
    assert cli.main(["demo", "--all", "--windows", "3", "--device", "cpu"]) == 0
    assert ran == [demo.Options(), demo.Options(every_scheme=True, windows=3)]
    assert ran[0].schemes == ("w8a8",)
    assert ran[1].schemes == ("w8a8", "w8a8_tensor", "w8a8_static", "w8a16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--windows", "0"], "wanted a positive number, got 0"),
        (["demo", "--windows", "many"], "invalid _positive value: 'many'"),
        (["demo", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_module_is_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "int8moe_compile", "--help"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("usage: int8moe ")
    assert "demo" in ran.stdout
