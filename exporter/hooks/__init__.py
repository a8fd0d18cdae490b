"""Where the exporter listens in on torch: clipping, GradScaler, the optimizer's step. Each is put back when nobody listens.

A hook calls the trainer's function with the trainer's arguments and returns its answer; what the exporter does on the way
cannot raise into it.
"""
