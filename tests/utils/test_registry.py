import subprocess
import sys

import pytest

from trinity.utils.registry import Registry, UnknownNameError


@pytest.fixture
def registry() -> Registry[type]:
    return Registry(
        "container", {"ordered": "collections.OrderedDict", "deque": "collections.deque"}
    )


def test_built_ins_are_found_by_name(registry: Registry[type]) -> None:
    from collections import OrderedDict

    assert registry.get("ordered") is OrderedDict
    assert "ordered" in registry and "list" not in registry


def test_built_ins_are_imported_when_asked_for() -> None:
    code = (
        "import sys; from trinity.utils.registry import Registry;"
        "r = Registry('x', {'a': 'calendar.Calendar'}); assert 'calendar' not in sys.modules;"
        "r.get('a'); assert 'calendar' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plugins_register(registry: Registry[type]) -> None:
    @registry.register_module("mine")
    class Mine: ...

    assert registry.get("mine") is Mine
    assert registry.names() == ["deque", "mine", "ordered"]


def test_plugins_register_by_a_call(registry: Registry[type]) -> None:
    assert registry.register_module("mine", dict) is dict
    assert registry.register_module(name="mine", module_cls=list, force=True) is list
    assert registry.get("mine") is list
    registry.register_module("ordered", force=True)(dict)
    assert registry.get("ordered") is dict


@pytest.mark.parametrize("name", ["ordered", "mine"])
def test_taken_names_are_refused(registry: Registry[type], name: str) -> None:
    registry.register_module("mine")(dict)
    with pytest.raises(ValueError, match=f"container name '{name}' is taken"):
        registry.register_module(name)(list)


def test_a_built_in_may_register_itself(registry: Registry[type]) -> None:
    from collections import OrderedDict

    assert registry.register_module("ordered")(OrderedDict) is OrderedDict


def test_any_object_by_its_path(registry: Registry[type]) -> None:
    from collections import Counter

    assert registry.get("collections.Counter") is Counter


def test_unknown_names_tell_the_nearest(registry: Registry[type]) -> None:
    with pytest.raises(UnknownNameError, match="No container is called 'ordred'") as caught:
        registry.get("ordred")
    assert "Did you mean 'ordered'?" in str(caught.value)
    assert "Known: deque, ordered" in str(caught.value)


def test_nothing_near_is_not_guessed(registry: Registry[type]) -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry.get("xyz")
    assert "Did you mean" not in str(caught.value)


def test_paths_that_lead_nowhere(registry: Registry[type]) -> None:
    with pytest.raises(UnknownNameError, match="collections has no 'Nothing'"):
        registry.get("collections.Nothing")
    with pytest.raises(ImportError):
        registry.get("no_such_module.Thing")
