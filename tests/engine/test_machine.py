"""What a run says of its machine: what kind it is, and never which one."""

import json
import os
import platform
from pathlib import Path

from lockstep.engine.machine import describe_cores, describe_machine, read_processor


def test_the_first_core_says_the_model(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel\t\t: 85\nmodel name\t: A  CPU @ 2.5 GHz\nprocessor\t: 1\nmodel name\t: other\n"
    )
    assert read_processor(info) == "A CPU @ 2.5 GHz"


def test_without_a_model_python_is_asked(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert read_processor(info) == platform.processor()
    info.write_text("processor\t: 0\nmodel name\t:\n")
    assert read_processor(info) == platform.processor()


def test_cores_are_those_that_may_be_used() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert describe_cores() == ("1" if os.cpu_count() == 1 else f"1 of {os.cpu_count():,}")
    finally:
        os.sched_setaffinity(0, before)


def test_the_machines_own_name_is_not_told() -> None:
    told = describe_machine()
    assert all(told.values())
    assert platform.system() in told["operating system"]
    assert platform.node() not in json.dumps(told)
