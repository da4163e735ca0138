"""Pages in the browser, drawn by Streamlit: how the commands that show one start it."""

from collections.abc import Sequence

import typer

HOST = typer.Option("127.0.0.1", "--host", help="Address it listens on; 0.0.0.0 opens it to all.")


def show_page(
    module: str, command: str, port: int, host: str, arguments: Sequence[str] = ()
) -> None:
    """Become the server of the page ``module``, until Ctrl-C."""
    import importlib.util
    import os
    import sys

    from trinity.cli.usage import UsageError
    from trinity.common.errors import MissingExtraError
    from trinity.launcher.hardware import is_port_free

    if importlib.util.find_spec("streamlit") is None:
        raise MissingExtraError("streamlit", "studio", command)
    if not is_port_free(port, host):
        raise UsageError(f"Port {port} is in use by another process. Name another with --port.")
    page = importlib.util.find_spec(module)
    assert page is not None and page.origin is not None
    typer.echo(f"The page is at http://{host}:{port}; Ctrl-C ends it.")
    options = {
        "server.port": str(port),
        "server.address": host,
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",  # without "Deploy"
        "runner.magicEnabled": "false",  # it would show values of expressions
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    sys.stdout.flush()
    server = [sys.executable, "-m", "streamlit", "run", page.origin, *flags, "--", *arguments]
    os.execv(sys.executable, server)
