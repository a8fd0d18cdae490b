"""What is seen of a step, one probe a file. ``exporter/attach.py`` puts them together; no probe knows another.

A probe puts tensors down on the training thread and never looks at them; once they have arrived, it turns them into signals
on the drain thread. Parameters, gradients and optimizer state are read here, never written.
"""
