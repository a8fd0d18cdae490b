"""Where records come from: exporters that are pulled by cursor, and folders of target files that name them.

Everything on the other end may be slow, broken or lying. Nothing here judges a record, and no fault here is ever more
than "cannot see the run".
"""
