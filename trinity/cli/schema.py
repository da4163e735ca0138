"""`trinity schema`: the JSON schema of a file, for completion in editors."""

import typer


def command() -> None:
    """Print the JSON schema of a file: `trinity schema > trinity.schema.json`."""
    import json

    from trinity.common.config.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
