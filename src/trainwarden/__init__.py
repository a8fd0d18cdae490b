"""trainwarden watches every optimizer step of a training run and closes the loop around a broken one.

Four rooms and the files they share:

* ``exporter``: runs inside the training process, one per rank; sees every step, acts on a plan at start.
* ``rules``: the daemon, the command line and replay; turns records into incidents and decisions.
* ``receiver``: beside the scheduler; verifies a signed request, stops the run, writes the plan, starts it again.
* ``demo``: the whole loop on one machine.

``signals``, ``names``, ``record``, ``plan``, ``runfolder`` and ``webhook`` are the contracts between the rooms. They import the
standard library and msgspec only (``webhook`` also standardwebhooks, inside sign and verify), so that no
room drags in what another one needs.
"""

__version__ = "0.1.0"
