"""The tables of mutations, and how one is judged. tests/unit/tools/mutations judges all of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from baton.errors import ConfigError
from tools.mutate import (
    TABLES,
    Mutation,
    Outcome,
    TreeCopy,
    changed_text,
    judge_all,
    read_mutations,
)

MUTATIONS = read_mutations(*TABLES)


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 60


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_each_applies_and_its_tests_are_there(mutation: Mutation) -> None:
    assert changed_text(mutation)


MODULE = "def double(number):\n    return 2 * number\n"
TEST = "from doubling import double\n\n\ndef test_two():\n    assert double(2) == 4\n"


def a_mutation(old: str = "2 * number", new: str = "3 * number", **fields: str) -> Mutation:
    row = {"name": "another factor", "file": "doubling.py"} | fields
    return Mutation(row["name"], row["file"], old, new, (row.get("tests", "tests/test_it.py"),))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository with one module and one test."""
    root = tmp_path / "tree"
    (root / "tests").mkdir(parents=True)
    (root / "doubling.py").write_text(MODULE)
    (root / "tests" / "test_it.py").write_text(TEST)
    (root / "tests" / "conftest.py").write_text("")
    (root / "ignored.py").write_text("")
    (root / ".gitignore").write_text("ignored.py\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.mark.long
def test_what_tests_notice_is_killed_and_what_they_do_not_survives(
    tree: Path, tmp_path: Path
) -> None:
    copies = [TreeCopy(tmp_path / name, tree) for name in "ab"]
    assert not (copies[0].root / "ignored.py").exists()
    wrong = a_mutation(name="killed")
    equal = a_mutation(new="number * 2", name="survived")
    none = a_mutation(old="def double", new="def triple", name="broken")
    found = {one.mutation.name: one for one in judge_all([wrong, equal, none], copies)}
    assert {name: one.outcome.value for name, one in found.items()} == {
        one.value: one.value for one in Outcome
    }
    assert "assert 6 == 4" in found["killed"].output
    for copy in copies:
        assert (copy.root / "doubling.py").read_text() == MODULE
        assert copy.run(["tests"])[0] == 0
    assert (tree / "doubling.py").read_text() == MODULE


@pytest.mark.long
def test_changes_of_the_same_size_one_after_another_are_all_seen(
    tree: Path, tmp_path: Path
) -> None:
    """Whatever bytecode the ones before have left."""
    copy = TreeCopy(tmp_path / "copy", tree)
    for factor in range(3, 6):
        assert (
            f"assert {2 * factor} == 4" in copy.judge(a_mutation(new=f"{factor} * number")).output
        )


@pytest.mark.parametrize(
    ("mutation", "why"),
    [
        (a_mutation(old="4 * number"), "has its text 0 times"),
        (a_mutation(old="number"), "has its text 2 times"),
        (a_mutation(new="2 * number"), "changes nothing"),
        (a_mutation(file="tripling.py"), "there is no file tripling.py"),
        (a_mutation(tests="tests/test_others.py"), "there is no test tests/test_others.py"),
        (a_mutation(tests="tests/test_it.py::test_three"), "there is no test tests/test_it.py::"),
    ],
)
def test_a_row_that_no_longer_applies_is_an_error(tree: Path, mutation: Mutation, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        changed_text(mutation, tree)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('name = "a"\nfile = "b"\nold = "c"\nnew = "d"\n', "tests"),
        ('name = "a"\nfile = "b"\nold = "c"\nnew = "d"\ntests = []\nmore = 1\n', "more"),
    ],
)
def test_a_table_with_other_fields_is_an_error(tmp_path: Path, row: str, why: str) -> None:
    (tmp_path / "table.toml").write_text(f"[[mutation]]\n{row}")
    with pytest.raises(ConfigError, match=why):
        read_mutations(tmp_path / "table.toml")


def test_rows_of_one_name_are_an_error(tmp_path: Path) -> None:
    row = '[[mutation]]\nname = "a"\nfile = "b"\nold = "c"\nnew = "d"\ntests = []\n'
    for name in ("one.toml", "other.toml"):
        (tmp_path / name).write_text(row)
    with pytest.raises(ConfigError, match="several mutations are named 'a'"):
        read_mutations(tmp_path / "one.toml", tmp_path / "other.toml")
