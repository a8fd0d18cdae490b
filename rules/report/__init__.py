"""Pictures and pages of recorded runs, and the words for people that go with them.

Everything here is a function of plain data: recorded columns (``recorded.py``) and the result object of a replay. Nothing
is judged here, nothing is fetched, and a page needs nothing but itself to be read.
"""
