"""Anomaly mode: some steps that are looked at as closely as torch allows, whatever it costs.

Asked for by a plan (``anomaly``), by ``exporter.look_closely()`` or by the setting ``anomaly``. Nothing of it is imported before. While
it is on, every module's output and the gradient of it are measured, every operation of the forward pass and every node of the
backward pass is checked for being the first to make something of finite values that is not finite, and torch's own anomaly mode
keeps the forward traceback of each node. Of all that nothing is read on the training thread, and nothing changes a value.
"""
