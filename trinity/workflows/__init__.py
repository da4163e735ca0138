"""Built-in workflows. Names: `trinity.common.workflows.WORKFLOWS`."""
