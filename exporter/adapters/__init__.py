"""One file for each trainer or library that the exporter can be attached to without writing the loop oneself.

Each imports its library; nothing else in the exporter does until an adapter asks for it.
"""
