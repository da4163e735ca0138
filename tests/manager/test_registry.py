from typing import Any

import pytest

from trinity.manager.config_registry.config_registry import ConfigRegistry


def registry(calls: list[str]) -> ConfigRegistry:
    generators = ConfigRegistry()

    @generators.register_config(default_value=3, other_configs={"_each": 1})
    def set_size(**kwargs: Any) -> None:
        calls.append(f"draw {kwargs['key']}")

    @generators.register_config(default_value="a", visible=lambda: False)
    def set_hidden(key: str) -> None:
        calls.append("never")

    @generators.register_check()
    def check_size(unfinished_fields: set[str], key: str) -> None:
        unfinished_fields.add(key)

    return generators


def test_a_setting_is_drawn_by_its_name_and_checked() -> None:
    calls: list[str] = []
    generators, unfinished = registry(calls), set[str]()
    for name in generators.names():
        generators.draw(name, unfinished)
    assert calls == ["draw size"]
    assert unfinished == {"size"}
    assert generators.visible(["size", "hidden"]) == ["size"]


def test_defaults_fill_what_is_missing_only() -> None:
    state: dict[str, Any] = {"size": 8}
    registry([]).fill(state)
    assert state == {"size": 8, "_each": 1, "hidden": "a"}


def test_names_have_a_prefix_and_are_unique() -> None:
    generators = registry([])
    with pytest.raises(ValueError, match="set_<setting>"):
        generators.register_config()(lambda **_: None)
    with pytest.raises(KeyError, match="'size' already"):
        registry([]).register_config()(generators._draw["size"])
    with pytest.raises(KeyError, match="no setting 'sise'"):
        generators.draw("sise", set())
