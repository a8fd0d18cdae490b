"""What a step ate: from the journals of a run's folder to samples, rows, files and text. Reads alone, and asks nobody.

Which row lies at a position is told by whoever calls (``trainwarden data show`` asks the exporter's own loader), so that nothing
here needs torch.
"""
