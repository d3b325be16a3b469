"""Nothing runs that the user did not name: no module that lies in the current folder, no program of a foreign .git.

The library is copied into the environment of another project, whose folder has files called like modules and a git
checkout whose settings name programs. Every one of them would leave its name in a file.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lab_configs import BASE
from slimbayes_lab.runs import folder as run_folder
from slimbayes_lab.runs.process import COMMAND, SAFE

import slimbayes

MODULES = (
    "typer", "torch", "yaml", "numpy", "json", "random", "pydantic", "rich", "slimbayes", "logging", "typing", "click",
    "safetensors", "sklearn", "scipy", "PIL", "lightning_fabric", "torchmetrics", "jinja2", "socket", "tempfile",
    "multiprocessing", "optuna", "pandas", "pyarrow",
)  # fmt: skip
CANARY = "import os\nwith open(os.environ['CANARY'], 'a') as file:\n    file.write(__name__ + '\\n')\n"
HOSTILE_GIT = """\
[core]
\trepositoryformatversion = 0
\tfsmonitor = {program}
\thooksPath = {hooks}
\tpager = {program}
\teditor = {program}
\tsshCommand = {program}
\tattributesFile = {attributes}
[filter "evil"]
\tclean = {program}
\tsmudge = {program}
\tprocess = {program}
[diff "evil"]
\ttextconv = {program}
\tcommand = {program}
[diff]
\texternal = {program}
[alias]
\trev-parse = !{program}
\tstatus = !{program}
[user]
\tname = a
\temail = a@example.org
"""
NAMED = ("-c", "user.name=a", "-c", "user.email=a@example.org")


def git(folder: Path, *words: str) -> str:
    """Git as the owner of a folder calls it, without what its settings name."""
    done = subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *words],
        cwd=folder, capture_output=True, text=True, check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"},
    )  # fmt: skip
    return done.stdout.strip()


def make_checkout(folder: Path, canary: Path) -> str:
    """A git checkout with one commit and one changed file; then its settings become hostile. Returns the commit."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    (folder / "theirs.txt").write_text(str(folder))
    git(folder, "add", "theirs.txt")
    git(folder, *NAMED, "commit", "-qm", "theirs")
    hooks = folder / ".git" / "evil-hooks"
    hooks.mkdir()
    program = hooks / "post-index-change"
    program.write_text(f"#!/bin/sh\necho git >> {canary}\n")
    program.chmod(0o755)
    attributes = folder / ".git" / "evil-attributes"
    attributes.write_text("* filter=evil diff=evil\n")
    (folder / ".git" / "config").write_text(
        HOSTILE_GIT.format(program=program, hooks=hooks, attributes=attributes)
    )
    (folder / "theirs.txt").write_text("2")
    return git(folder, "-c", "alias.rev-parse=", "rev-parse", "HEAD")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a hostile checkout, the library in its environment, and files called like modules."""
    make_checkout(tmp_path, tmp_path / "canary")
    packages = tmp_path / ".venv" / "lib" / "site-packages"
    shutil.copytree(Path(slimbayes.__file__).parent, packages / "slimbayes")
    script = tmp_path / ".venv" / "bin" / "slimbayes"
    script.parent.mkdir()
    # As pip writes it.
    script.write_text(
        "import sys\nfrom slimbayes_lab.__main__ import main\n"
        'if __name__ == "__main__":\n    sys.exit(main())\n'
    )
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(CANARY)
    return tmp_path


def environment(project: Path) -> dict[str, str]:
    clean = {n: v for n, v in os.environ.items() if n != "PYTHONSAFEPATH"}
    packages = project / ".venv" / "lib" / "site-packages"
    return clean | {
        "CANARY": str(project / "canary"),
        "PYTHONPATH": str(packages),
    }


def executed(project: Path) -> list[str]:
    file = project / "canary"
    return sorted(set(file.read_text().split())) if file.exists() else []


def run(project: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=project, env=environment(project), capture_output=True, text=True, timeout=200,
    )  # fmt: skip


# Every command in one process, as its script starts: its help, then what it does.
ALL_COMMANDS = """\
import sys
sys.path[0] = {bin!r}  # as of the script that lies there
from slimbayes_lab.__main__ import main

def ask(*words):
    sys.argv = ["slimbayes", *words]
    try:
        main()
    except SystemExit as end:
        print("##", " ".join(words), "->", end.code, flush=True)

HELP = "fit evaluate diagnose stack predict export compare report sweep reproduce init data config".split()
for command in HELP:
    ask(command, "--help")
ask("init", "rows.csv", "--target", "y", "-o", "written.yaml")
ask("config", "check", "c.yaml")
ask("config", "show", "c.yaml")
ask("config", "schema")
ask("data", "list", "--data-dir", ".")
ask("reproduce", "--list")
ask("fit", "c.yaml", "--out", "run")
ask("evaluate", "run")
ask("diagnose", "run")
ask("predict", "run", "new.csv", "-o", "p.csv")
ask("compare", "run")
ask("report", "run", "-o", "p.html")
ask("sweep", "c.yaml", "--out", "runs", "--over", "seed=[1]")
"""


@pytest.mark.slow
def test_no_command_runs_what_lies_in_the_current_folder(project: Path) -> None:
    rows = [f"{i},{i % 3},{'yes' if i % 2 else 'no'}" for i in range(40)]
    (project / "rows.csv").write_text("\n".join(["a,b,y", *rows, ""]))
    (project / "new.csv").write_text("a,b\n1,2\n")
    tree = BASE | {
        "data": {"csv": "rows.csv", "target": "y"},
        "model": {"kind": "mlp", "hidden": [4]},
        "train": {
            "epochs": 1,
            "batch": 16,
            "optimizer": {"kind": "SGD", "lr": 0.1},
        },
        "evaluate": {"draws": [1]},
    }
    (project / "c.yaml").write_text(yaml.safe_dump(tree))
    script = project / ".venv" / "bin" / "all_commands.py"
    script.write_text(ALL_COMMANDS.format(bin=str(script.parent)))
    done = run(project, script)
    assert executed(project) == []
    ended = [line for line in done.stdout.splitlines() if line.startswith("##")]
    assert all(line.endswith("-> 0") for line in ended), done.stdout + done.stderr
    assert len(ended) == ALL_COMMANDS.count("ask(") + 11  # the loop and its function
    # The runs, one of them in a process of its own, know no commit, least of all that of the project.
    kept = [project / "run", *(project / "runs").iterdir()]
    assert len(kept) == 2
    for folder in kept:
        assert (folder / "record.json").exists()
        assert "commit" not in (folder / "environment.json").read_text()


@pytest.mark.slow
def test_the_module_runs_nothing_of_the_current_folder(project: Path) -> None:
    """But slimbayes itself, which Python looks up there before any of it is run: -P keeps it from doing so."""
    done = run(project, "-P", "-m", "slimbayes_lab", "config", "--help")
    assert done.returncode == 0 and executed(project) == []
    (project / "slimbayes.py").unlink()
    done = run(project, "-m", "slimbayes_lab", "config", "--help")
    assert done.returncode == 0 and executed(project) == []


@pytest.mark.slow
def test_processes_of_the_command_find_nothing_in_the_current_folder(
    project: Path,
) -> None:
    """Those that Fabric and multiprocessing start, whose words are not ours."""
    (project / ".venv" / "bin" / "spawns.py").write_text(
        "import sys\n"
        "from slimbayes_lab.__main__ import main\n"
        "sys.argv = ['slimbayes', '--version-that-is-none']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "import subprocess\n"
        "subprocess.run([sys.executable, '-c', 'import random, socket, tempfile'], check=True)\n"
        "subprocess.run([sys.executable, '-m', 'json.tool', '--help'], check=True)\n"
    )
    done = run(project, project / ".venv" / "bin" / "spawns.py")
    assert done.returncode == 0, done.stderr
    assert executed(project) == []


def test_runs_of_sweeps_start_without_the_current_folder() -> None:
    assert "-P" in COMMAND and SAFE == {"PYTHONSAFEPATH": "1"}


# --- git ---


@pytest.fixture
def checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, str]]:
    """A checkout of this project, with its commit; the library seems to lie in it."""
    root = tmp_path / "checkout"
    package = root / "src" / "slimbayes"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (root / "pyproject.toml").write_text('[project]\nname = "slimbayes"\n')
    commit = make_checkout(root, tmp_path / "canary")
    monkeypatch.setattr(slimbayes, "__file__", str(package / "__init__.py"))
    yield root, commit
    assert not (tmp_path / "canary").exists(), "a program of the settings has run"


def test_a_checkout_knows_its_commit_and_runs_no_hook(
    checkout: tuple[Path, str],
) -> None:
    assert run_folder._commit() == {"commit": checkout[1], "changed files": "1"}


def test_variables_of_another_project_lead_nowhere(
    checkout: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As git sets them for its hooks."""
    make_checkout(tmp_path / "other", tmp_path / "canary")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    assert run_folder._commit()["commit"] == checkout[1]


@pytest.mark.parametrize("case", ["installed", "vendored", "another name", "no git"])
def test_another_project_lends_no_commit(
    case: str, checkout: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = checkout
    package = root / "src" / "slimbayes"
    if case == "installed":
        package = root / ".venv" / "lib" / "python3.13" / "site-packages" / "slimbayes"
    elif case == "vendored":  # its source, without its own .git, in another's checkout
        package = root / "third_party" / "bayes" / "src" / "slimbayes"
        package.mkdir(parents=True)
        shutil.copy(root / "pyproject.toml", root / "third_party" / "bayes")
    elif case == "another name":
        (root / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
    else:  # what is called .git is none, and the next one is another's
        make_checkout(root.parent, root.parent / "canary")
        shutil.rmtree(root / ".git")
        (root / ".git").mkdir()
    package.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(slimbayes, "__file__", str(package / "__init__.py"))
    assert run_folder._commit() == {}
