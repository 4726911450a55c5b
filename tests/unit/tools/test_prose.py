"""The prose linter finds what the style sheet refuses, and nothing in code."""

from __future__ import annotations

import pytest

from tools.prose import MAX_WORDS, check

PAGE, MODULE, TEST = "docs/page.md", "router/module.py", "tests/unit/test_module.py"


def found(path: str, source: str) -> list[tuple[int, str]]:
    return [(one.line, one.text.partition(":")[0]) for one in check(path, source)]


def test_words_of_a_page_are_found_by_line() -> None:
    text = "Whoever reads.\n\nThe key `nobody`.\n\n```\nnobody\n```\nTokens are\nquantised anew.\n"
    assert found(PAGE, text) == [
        (1, "avoid 'Whoever'"),
        (9, "avoid 'quantised'"),
        (9, "avoid 'anew'"),
    ]


def test_targets_of_links_are_no_prose() -> None:
    assert found(PAGE, "See [the page](anew.md) and https://example.com/nobody for more.") == []


def test_docstrings_comments_and_messages_of_modules_are_checked() -> None:
    source = '''
def f():
    """Wait for nobody."""
    # Nobody comes.
    raise ValueError("nobody is here")
'''
    assert found(MODULE, source) == [
        (3, "avoid 'nobody'"),
        (4, "avoid 'Nobody'"),
        (5, "avoid 'nobody'"),
    ]


def test_texts_of_tests_are_data_and_names_are_prose() -> None:
    source = "def test_nobody_is_told():\n    assert ask('nobody knows')\n"
    assert found(TEST, source) == [(1, "avoid 'nobody'"), (1, "avoid 'is told'")]


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("The blocks of a sequence that", ["a docstring's first paragraph is whole sentences"]),
        ("The blocks of a sequence.", []),
        ("Blocks, in this order:\n\n- free\n- used", []),
        ("Free the blocks.", ["the docstring repeats the name 'free_blocks'"]),
    ],
)
def test_a_docstring_is_whole_sentences_and_says_more_than_the_name(
    docstring: str, expected: list[str]
) -> None:
    source = f'def free_blocks():\n    """{docstring}"""\n'
    assert [text for _, text in found(MODULE, source)] == [
        one.partition(":")[0] for one in expected
    ]


def test_a_field_s_docstring_is_checked() -> None:
    source = 'blocks: int\n"""Blocks."""\n'
    assert found(MODULE, source) == [(2, "the docstring repeats the name 'blocks'")]


def test_long_sentences_are_found_where_they_begin() -> None:
    long = " ".join(["word"] * (MAX_WORDS + 1))
    assert found(PAGE, f"Short.\n\n{long}.\n") == [
        (3, f"a sentence of {MAX_WORDS + 1} words; at most {MAX_WORDS}")
    ]
    assert found(PAGE, f"| {'a | ' * 2 * MAX_WORDS}") == []
