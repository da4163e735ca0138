from trinity.manager.config_registry.config_registry import CONFIG_GENERATORS

__all__ = ["CONFIG_GENERATORS"]
