"""Watches a script that has not a line of ours: what ``trainwarden exec`` brings into a training process.

Whatever the script does is taken as it comes: backward passes, clipping, scalers, optimizers' steps, and the numbers that it logs
itself. Nothing of the exporter's is made before an optimizer steps; a process that never does is left alone.
"""
