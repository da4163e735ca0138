"""The plugin contract: what a user imports to extend trinity. Import from its modules."""
