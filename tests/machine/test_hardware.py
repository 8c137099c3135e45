"""A processor is told from others that go by the same name."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from selfspec.machine.hardware import device_name, processor, processor_of

INTEL = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Processor
stepping\t: 8

processor\t: 1
model\t\t: 999
"""
ARM = """\
processor\t: 0
BogoMIPS\t: 243.75
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def test_the_first_processor_is_named_with_its_numbers() -> None:
    expected = "Intel(R) Xeon(R) Processor (cpu family 6, model 143, stepping 8)"
    assert processor_of(INTEL) == expected
    assert processor_of(ARM) == "(CPU implementer 0x41, CPU part 0xd40)"
    assert processor_of("model name : Some\n") == "Some"
    assert processor_of("") == ""


def test_there_is_a_name_without_linux_too() -> None:
    with mock.patch.object(Path, "read_text", side_effect=FileNotFoundError):
        assert processor.__wrapped__()


def test_a_device_is_named_by_what_runs_it() -> None:
    assert device_name(torch.device("cpu")) == processor()
    assert device_name(torch.device("mps")) == f"mps, {processor()}"
    with mock.patch("torch.cuda.get_device_name", return_value="a card"):
        assert device_name(torch.device("cuda")) == "a card"
