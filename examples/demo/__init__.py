"""The whole loop on one machine: a real run breaks, is rolled back with a plan, and recovers."""

if __name__.split(".")[0] != "trainwarden":
    raise ImportError("import trainwarden.demo, not the folder examples/demo: it would be a second copy of the package")
