"""The folder that ``trainwarden exec`` puts in front of PYTHONPATH; its one module runs when an interpreter starts."""
