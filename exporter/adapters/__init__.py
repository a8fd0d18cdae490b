"""One file for each trainer or library that the exporter can be attached to without writing the loop oneself.

Each imports its library; nothing else in the exporter does. What is known of a foreign object stays in here.
"""
