"""`trinity studio`: the page that writes configuration files."""

import typer

from trinity.cli.pages import HOST, show_page

PORT = typer.Option(8501, "--port", "-p", help="Port of the page.")


def command(port: int = PORT, host: str = HOST) -> None:
    """Write a configuration file on a page in the browser. Ends with Ctrl-C."""
    show_page("trinity.manager.config_manager", "trinity studio", port, host)
