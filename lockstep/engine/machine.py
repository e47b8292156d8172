"""What machine a run is on, for whoever reads its numbers later (step 10 on the walk): its kind, never its name."""

import os
import platform
from pathlib import Path

from lockstep.comm.world import count_cores

CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, str]:
    """Processor, cores and operating system, each where this machine tells it."""
    told = {"processor": read_processor(), "cores": describe_cores(), "operating system": name_system()}
    return {name: value for name, value in told.items() if value}


def read_processor(info: Path = CPU_INFO) -> str:
    """The processor's model as Linux has it, or else as Python does, which often knows nothing."""
    try:
        with info.open(encoding="utf-8", errors="replace") as lines:
            # Line by line: of a hundred cores the first one says it.
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name" and value.strip():
                    return " ".join(value.split())
    except OSError:
        pass
    return platform.processor()


def describe_cores() -> str:
    """The cores that this process may use, and of how many."""
    mine, every = count_cores(), os.cpu_count() or 1
    return f"{mine:,}" if mine == every else f"{mine:,} of {every:,}"


def name_system() -> str:
    """The distribution, where there is one, and the kernel."""
    kernel = f"{platform.system()} {platform.release()}".strip()
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    return ", ".join(filter(None, (name, kernel)))
