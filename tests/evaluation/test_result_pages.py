"""Every page of docs/results/ is what its checked-in results say, byte for byte."""

from __future__ import annotations

import re

import pytest

from benchmarks.pages import FOLDER, PAGES, main


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_results_say(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), f"python -m benchmarks.pages {name}"


def test_the_folder_holds_nothing_else():
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_links_to_is_there(name):
    links = re.findall(r"\]\(([^)#]+)", (FOLDER / name).read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (FOLDER / link).exists()]
    assert not missing


def test_unknown_pages_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["nope.md"])
    assert "no such page: nope.md. Use some of quality.md" in capsys.readouterr().err
