"""Cases that want Triton's interpreter run in processes of their own: Triton decides when a kernel is defined whether
it will be interpreted."""

import os
import subprocess
import sys
from pathlib import Path

PARTS = 2  # processes: every second case each


def run_cases(cases: Path) -> None:
    """Run a file of cases. Fails with what pytest says."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)]
    processes = []
    for part in range(PARTS):
        environment = {**os.environ, "TRITON_INTERPRET": "1", "CASES": f"{part} {PARTS}"}  # see conftest.py
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0, output
