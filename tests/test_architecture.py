"""The house rules that a linter cannot see: what an import costs, what is public, what the README promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import metaplastic
from metaplastic.layers import MIXERS

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("transformers", "triton", "fla", "numba", "lm_eval", "matplotlib", "typer", "rich", "datasets", "tokenizers")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_newcomer_in_one_process():
    """The import is under a second beyond torch, with none of the heavy packages, nor has the room of the data any;
    then the ten lines of Python in the README run as they are pasted."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    code = (
        "import sys, time, torch; start = time.process_time()\n"
        f"def loaded(): return [m for m in {HEAVY!r} if m in sys.modules]\n"
        "from metaplastic import layers, ops, rules\nprint(time.process_time() - start, loaded())\n"
        f"import metaplastic.tasks; print(loaded())\nfor block in {blocks!r}: exec(block, {{}})\n"
    )
    light, tasks, *read = python(code).splitlines()
    seconds, loaded = light.split(" ", 1)
    assert loaded == tasks == "[]"
    assert float(seconds) < 1.0
    assert len(read) >= len(blocks) and all(len(block.strip().splitlines()) <= 12 for block in blocks)


def test_the_command_line_answers_before_pytorch_is_loaded():
    assert python("import sys, metaplastic.cli; print('torch' in sys.modules)") == "False"


def test_the_package_is_the_command_too():
    run = [sys.executable, "-m", "metaplastic", "--version"]
    assert (
        subprocess.run(run, capture_output=True, text=True, check=True).stdout
        == f"metaplastic {metaplastic.__version__}\n"
    )


def test_public_names():
    assert len(metaplastic.__all__) <= 15
    assert all(hasattr(metaplastic, name) for name in metaplastic.__all__)
    assert set(metaplastic.backends()) == {"palimpsa", "additive", "delta", "bayesian"}


def test_the_docstring_runs():
    import doctest

    assert doctest.testmod(metaplastic).failed == 0


def test_no_file_is_too_long():
    """Room sizes that keep the code readable (CONTRIBUTING.md)."""
    source = ROOT / "src" / "metaplastic"
    limits = {"rules": 150, "layers": 290, "ops": 400}
    for file in source.rglob("*.py"):
        room = file.relative_to(source).parts[0]
        assert len(file.read_text().splitlines()) <= limits.get(room, 350), file


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "attention"])
def test_readme_code_is_for_every_memory(mixer, capsys):
    """The name of the mixer is all that has to be changed in it."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block.count('mixers="palimpsa_d"') == 1
    exec(block.replace('mixers="palimpsa_d"', f"mixers={mixer!r}"), {})
    assert str(MIXERS[mixer].memory_type._fields) in capsys.readouterr().out


def test_readme_names_every_mixer():
    text = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in text for name in MIXERS)
    assert all(f"`{kind.__name__}`" in text for kind in MIXERS.values())


def test_readme_tree_is_true():
    """Every path in the README's tree exists, and every package is in it."""
    tree = (ROOT / "README.md").read_text().split("## Where things are")[1]
    named = set(re.findall(r"^\s+(\w+)/ ", tree, re.M))
    packages = {p.parent.name for p in (ROOT / "src" / "metaplastic").glob("*/__init__.py")}
    assert packages <= named
    operators = {p.parent.name for p in (ROOT / "src" / "metaplastic" / "ops").glob("*/__init__.py")}
    top = {p.name for p in ROOT.iterdir() if p.is_dir()} | packages | operators | {"metaplastic", "results"}
    assert named <= top


def test_figures_and_results_named_in_the_docs_exist():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} names {target}"
        for target in re.findall(r"`(docs/[\w/.-]+)`", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name} names {target}"
