"""The README keeps its word: its example runs, its tree is the tree, its tables are what results/ gives."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import readme_tables

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FIRST_LINE = re.compile(r"# \w+\.py, run by: (.* (\w+\.py))\n")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def write_csv(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


EXAMPLES = {match[2]: (match[1], block) for block in code_blocks("python") if (match := FIRST_LINE.match(block))}


def test_there_are_examples_of_one_process_and_of_several():
    assert {name: command for name, (command, _) in EXAMPLES.items()} == {
        "example.py": "torchrun --nproc-per-node 2 example.py",
        "masks.py": "python masks.py",
        "documents.py": "torchrun --nproc-per-node 2 documents.py",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_as_written_on_cpu_processes(name: str, tmp_path: Path):
    command, example = EXAMPLES[name]
    (tmp_path / name).write_text(example)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
    program, *arguments = command.split()
    run = [sys.executable, *launcher[program], *arguments]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_every_module_and_script_is_in_the_tree_and_nothing_else():
    tree = next(block for block in code_blocks("") if block.startswith("ringflash/\n"))
    named = set(re.findall(r"[\w/]+\.(?:py|sh)\b", tree))
    found = {p.name for folder in ("ringflash", "scripts") for p in (ROOT / folder).iterdir() if p.is_file()}
    assert named == {name for name in found if name.endswith((".py", ".sh"))} - {"__init__.py"}


def test_every_file_that_a_command_names_exists():
    commands = "\n".join(code_blocks("bash"))
    paths = set(re.findall(r"scripts/[\w.]+", commands + README))
    assert {"scripts/quickstart.sh", "scripts/test.sh"} <= paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/test.sh", "scripts/setup_venv.sh", ".ci/run"])
def test_shell_scripts_are_executable_and_parse(script: str):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("place", readme_tables.PLACES)
def test_tables_are_what_results_give(place: str):
    text = (ROOT / place).read_text()
    written = readme_tables.render(text, ROOT / "results")
    assert written == text, f"results/ has rows that {place} does not show: run python scripts/readme_tables.py"


def test_every_table_that_can_be_written_has_a_place():
    places = "".join((ROOT / place).read_text() for place in readme_tables.PLACES)
    assert re.findall(r"<!-- table:(\w+) -->", places) == list(readme_tables.TABLES)


ORIGIN = {"date": "2031-01-02T03:04:05Z", "commit": "abc", "device": "A GPU", "torch": "9.9", "triton": "8.8"}
CASE = {"b": "1", "h": "4", "g": "2", "s": "64", "d": "128", "dtype": "bf16", "mask": "causal"}


def error_row(ratio: float, **changes: str) -> dict[str, str]:
    """A row of check_local.csv whose tensors are `ratio` times as wrong as the peer's."""
    errors = {f"{name}_error": str(ratio * 2e-3) for name in ("out", "lse", "dq", "dk", "dv")}
    peers = {f"{name}_peer": "" if name == "lse" else "2e-3" for name in ("out", "lse", "dq", "dk", "dv")}
    return ORIGIN | CASE | {"rows": "all"} | errors | peers | {"passed": "True"} | changes


def test_error_table_gives_the_worst_ratio_of_the_last_run_of_each_case(tmp_path: Path):
    rows = [
        error_row(9.0, date="2030-01-01T00:00:00Z", passed="False"),  # measured again later
        error_row(1.0),
        error_row(1.05, s="100", passed="False"),
        error_row(7.0, s="1", dq_error="1e-9", dk_error="1e-9", dv_error="1e-9", out_error="1e-9"),  # no rounding
    ]
    write_csv(tmp_path / "check_local.csv", rows)
    text = readme_tables.render("<!-- table:check_local -->\n<!-- /table:check_local -->", tmp_path)
    assert "| A GPU | bf16 | 128 | 1 to 100 | 2 of 3 | 1.050 | 1.4e-02 | 1.050 | 1.050 | 1.050 |" in text
    assert "A GPU, torch 9.9, triton 8.8, commit abc, 2031-01-02." in text
    assert "2030" not in text


def test_speed_table_puts_implementations_side_by_side_and_marks_what_is_missing(tmp_path: Path):
    def row(name: str, which: str, tflops: str, **changes: str) -> dict[str, str]:
        return ORIGIN | {"implementation": name} | CASE | {"pass": which, "tflops": tflops} | changes

    rows = [
        *(row("ringflash", "forward", "400.4"), row("ringflash", "backward", "300.6")),
        *(row("peer", "forward", "500"), row("peer", "backward", "")),
        *(row("absent", "forward", ""), row("absent", "backward", "")),
        row("ringflash", "forward", "0.1", device="CPU x"),
    ]
    write_csv(tmp_path / "bench_local.csv", rows)
    text = readme_tables.render("<!-- table:bench_local -->\nold\n<!-- /table:bench_local -->", tmp_path)
    assert "| b h/g s d | ringflash | peer |" in text
    assert "| 1 4/2 64 128 bf16 causal | 400 / 301 | 500 / - |" in text
    assert "CPU" not in text and "old" not in text


def test_ring_table_has_one_line_for_each_ring(tmp_path: Path):
    def row(name: str, layout: str, ranks: str, which: str, **changes: str) -> dict[str, str]:
        figures = {"median_ms": "2.0", "tflops_per_gpu": "350", "fastest_one_gpu": "peer"}
        figures |= {"speedup": "1.9", "efficiency": "0.95"}
        moving = {"process_group": "nccl", "transport": "nvlink", "peak_mib_above_inputs": "1234.4"}
        who = {"implementation": name, "layout": layout, "ranks": ranks}
        return ORIGIN | moving | CASE | who | {"pass": which} | figures | changes

    passes = "forward", "forward+backward"
    rows = [
        *(row("peer", "", "1", which) for which in passes),
        *(row("ringflash", "zigzag", "2", which) for which in passes),
        *(row("other", "zigzag", "2", which, median_ms="", peak_mib_above_inputs="") for which in passes),
    ]
    write_csv(tmp_path / "bench_ring.csv", rows)
    text = readme_tables.render("<!-- table:bench_ring -->\n<!-- /table:bench_ring -->", tmp_path)
    line = "ringflash, zigzag | 2.00 / 2.00 | 350 / 350 | peer | 1.90 / 1.90 | 0.95 / 0.95 | 1234 |"
    assert f"| 1 4/2 64 128 bf16 causal | 2 | nvlink | {line}" in text
    assert text.count("peer") == 1 and "other" not in text


def test_efficiency_table_puts_others_and_the_kernels_alone_beside_the_ring(tmp_path: Path):
    def row(name: str, which: str, efficiency: str, **changes: str) -> dict[str, str]:
        who = {"implementation": name, "layout": "zigzag", "ranks": "2", "transport": "nvlink"}
        return ORIGIN | CASE | who | {"pass": which, "median_ms": "4.0", "efficiency": efficiency} | changes

    rows = [
        *(row("ringflash", "forward", "0.9"), row("ringflash", "forward+backward", "0.8")),
        *(row("other", "forward", "0.7"), row("other", "forward+backward", "")),
        *(row("absent", "forward", ""), row("one", "forward", "1.0", layout="", ranks="1")),
        row("ringflash", "forward", "0.85", s="32"),
        row("ringflash", "forward", "0.6", ranks="4"),
    ]
    emulated = ORIGIN | CASE | {"world": "2", "layout": "zigzag", "pass": "forward", "own_efficiency": "0.96"}
    write_csv(tmp_path / "bench_ring.csv", rows)
    before = emulated | {"date": "2030-01-01T00:00:00Z", "own_efficiency": "0.5"}
    write_csv(tmp_path / "emulate_ring.csv", [before, emulated])
    text = readme_tables.render("<!-- table:ring_efficiency -->\n<!-- /table:ring_efficiency -->", tmp_path)
    two, four = text.index("| 2 GPUs, bf16 causal; b h/g s d: | 1 4/2 32 128 | 1 4/2 64 128 |"), text.index("| 4 GPUs")
    assert "| ringflash, zigzag, kernels alone | - | 0.96 / - |" in text[two:four]
    assert "| ringflash, zigzag, nvlink | 0.85 / - | 0.90 / 0.80 |" in text[two:four]
    assert "| other, zigzag | - | 0.70 / - |" in text[two:four]
    assert "| ringflash, zigzag, nvlink | 0.60 / - |" in text[four:]
    assert "absent" not in text and "one," not in text


def test_errors_of_rings_stand_beside_flash_attention_2s(tmp_path: Path):
    def row(name: str, layout: str, ratio: float, passed: str) -> dict[str, str]:
        errors = {f"{n}_error": str(2e-3 * ratio) if passed else "" for n in ("out", "dq", "dk", "dv")}
        yardstick = {f"{n}_fa2": "2e-3" for n in ("out", "dq", "dk", "dv")}
        who = {"process_group": "nccl", "implementation": name, "layout": layout, "ranks": "2"}
        return ORIGIN | CASE | who | errors | yardstick | {"passed": passed}

    rows = [row("ringflash", "zigzag", 1.02, "True"), row("other", "zigzag", 1.5, "False"), row("absent", "", 1, "")]
    rows[0]["dk_error"] = "2.1e-3"
    write_csv(tmp_path / "accuracy_ring.csv", rows)
    text = readme_tables.render("<!-- table:accuracy_ring -->\n<!-- /table:accuracy_ring -->", tmp_path)
    assert "| ringflash, zigzag | 2.04e-03 | 2.04e-03 | 2.10e-03 | 2.04e-03 | 1.050 |" in text
    assert "| other, zigzag | 3.00e-03 | 3.00e-03 | 3.00e-03 | 3.00e-03 | 1.500 |" in text
    assert "absent" not in text


def test_missing_results_say_so(tmp_path: Path):
    text = readme_tables.render("<!-- table:check_ring -->\n9 of 9\n<!-- /table:check_ring -->", tmp_path)
    assert text == "<!-- table:check_ring -->\nNot measured yet.\n<!-- /table:check_ring -->"


def test_rows_from_cpus_are_in_no_table(tmp_path: Path):
    write_csv(tmp_path / "check_local.csv", [error_row(1.0, device="CPU x86_64")])
    text = readme_tables.render("<!-- table:check_local -->\n<!-- /table:check_local -->", tmp_path)
    assert "Not measured yet." in text
