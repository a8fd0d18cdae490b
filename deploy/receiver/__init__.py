"""Beside the scheduler: takes a signed request, verifies it, stops the run, writes the plan, starts the next attempt."""

if __name__.split(".")[0] != "trainwarden":
    raise ImportError(
        "import trainwarden.receiver, not the folder deploy/receiver: it would be a second copy of the package"
    )
