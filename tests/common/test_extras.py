import pickle

import pytest

from trinity.common.errors import MissingExtraError
from trinity.common.extras import needed


def test_an_absent_package_is_named_with_the_extra_that_brings_it():
    with pytest.raises(MissingExtraError, match=r"Games needs .*'no_such'.*trinity-rft\[games\]"):
        needed("no_such.part", "games", "Games")
    with pytest.raises(MissingExtraError, match="'shown'"):
        needed("no_such", "games", package="shown")


def test_who_asked_is_told_in_another_process_too():
    error = MissingExtraError("shown", "games", "Games")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_what_an_installed_package_lacks_is_not_blamed_on_the_package(tmp_path, monkeypatch):
    (tmp_path / "installed_here.py").write_text("import something_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="something_it_needs") as found:
        needed("installed_here", "games")
    assert not isinstance(found.value, MissingExtraError)


def test_warnings_of_the_compiler_about_a_package_are_not_for_the_user(
    tmp_path, monkeypatch, recwarn
):
    (tmp_path / "sloppy_here.py").write_text("same = 1\nfound = same is 'one'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert needed("sloppy_here", "games").found is False
    assert not recwarn.list


def test_a_part_is_given_as_it_is():
    assert needed("json.decoder", "core").JSONDecoder().decode("1") == 1
