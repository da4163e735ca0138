"""`trinity studio`: the page that writes configuration files."""

import typer

PORT = typer.Option(8501, "--port", "-p", help="Port of the page.")
HOST = typer.Option("127.0.0.1", "--host", help="Address it listens on; 0.0.0.0 opens it to all.")


def command(port: int = PORT, host: str = HOST) -> None:
    """Write a configuration file on a page in the browser. Ends with Ctrl-C."""
    import importlib.util
    import os
    import sys

    from trinity.cli.usage import UsageError
    from trinity.common.errors import MissingExtraError
    from trinity.launcher.hardware import is_port_free

    if importlib.util.find_spec("streamlit") is None:
        raise MissingExtraError("streamlit", "studio", "trinity studio")
    if not is_port_free(port, host):
        raise UsageError(f"Port {port} is in use by another process. Name another with --port.")
    page = importlib.util.find_spec("trinity.manager.config_manager")
    assert page is not None and page.origin is not None
    typer.echo(f"The Studio is at http://{host}:{port}; Ctrl-C ends it.")
    options = {
        "server.port": str(port),
        "server.address": host,
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "streamlit", "run", page.origin, *arguments])
